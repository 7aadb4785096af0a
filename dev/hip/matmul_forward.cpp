// A linear layer's product.
#include "benchmark.h"

static const llamac::Benchmarks matmul_forward = {
    {.operation = "matmul_forward", .absent = {"residual", "bias"}, .widths_8b = "N=8192,C=8192,K=8192"}};
