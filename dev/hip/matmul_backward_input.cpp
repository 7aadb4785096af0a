// The gradient of a linear layer's input.
#include "benchmark.h"

static const llamac::Benchmarks matmul_backward_input = {
    {.operation = "matmul_backward_input", .widths_8b = "N=8192,C=8192,K=8192"}};
