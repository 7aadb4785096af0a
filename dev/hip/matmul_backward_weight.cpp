// The gradient of a linear layer's weight.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {
    {.operation = "matmul_backward_weight", .widths_8b = "N=8192,C=8192,K=8192"}};
