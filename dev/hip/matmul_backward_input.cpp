// The gradient of a linear layer's input.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {
    {.operation = "matmul_backward_input", .widths_8b = "N=8192,C=8192,K=8192"}};
