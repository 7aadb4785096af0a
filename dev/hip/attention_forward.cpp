// Causal attention with grouped queries.
#include "benchmark.h"

static const llamac::Benchmarks attention_forward = {
    {.operation = "attention_forward", .absent = {"first", "end"}}};
