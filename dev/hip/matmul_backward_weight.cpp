// The gradient of a linear layer's weight.
#include "benchmark.h"

static const llamac::Benchmarks matmul_backward_weight = {
    {.operation = "matmul_backward_weight", .widths_8b = "N=8192,C=8192,K=8192"}};
