// SwiGLU, backward.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {
    {.operation = "swiglu_backward", .absent = {"out"}}};
