// A bias, added in place; 8b: queries, keys and values of Qwen2 7B.
#include "benchmark.h"

static const llamac::Benchmarks bias_forward = {
    {.operation = "bias_forward", .in_place = {"out", "x"}, .widths_8b = "N=8192,K=4608"}};
