// The table of RoPE's angles, at Llama 3.1's longest context.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {
    {.operation = "precompute_cis", .widths_8b = "T=131072"}};
