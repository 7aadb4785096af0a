// SwiGLU on the joined gate and up rows.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "swiglu_forward"}};
