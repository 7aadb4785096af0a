// Causal attention with grouped queries.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {
    {.operation = "attention_forward", .absent = {"first"}}};
