// A bias, added in place; 8b: queries, keys and values of Qwen2 7B.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {
    {.operation = "bias_forward", .in_place = {"out", "x"}, .widths_8b = "N=8192,K=4608"}};
