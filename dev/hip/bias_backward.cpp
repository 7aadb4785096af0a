// The gradient of a bias; 8b: queries, keys and values of Qwen2 7B.
#include "benchmark.h"

static const llamac::Benchmarks bias_backward = {
    {.operation = "bias_backward", .widths_8b = "N=8192,K=4608"}};
