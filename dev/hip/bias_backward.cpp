// The gradient of a bias; 8b: queries, keys and values of Qwen2 7B.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {
    {.operation = "bias_backward", .widths_8b = "N=8192,K=4608"}};
