// Causal attention with grouped queries, backward.
#include "benchmark.h"

static const llamac::Benchmarks attention_backward = {
    {.operation = "attention_backward", .absent = {"first", "end"}}};
