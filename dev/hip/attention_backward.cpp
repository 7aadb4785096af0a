// Causal attention with grouped queries, backward.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {
    {.operation = "attention_backward", .absent = {"first"}}};
