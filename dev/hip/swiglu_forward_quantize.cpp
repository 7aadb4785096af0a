// SwiGLU that writes fp8.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "swiglu_forward_quantize"}};
