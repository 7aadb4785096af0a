// Attention of the token for which a cache has room left, to all before it.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {
    {.operation = "attention_decode", .widths_8b = "B=1", .first = {"begin"}, .last = {"end"}}};
