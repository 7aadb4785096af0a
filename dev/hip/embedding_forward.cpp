// Embedding: a row of the table for every token, alone and with that of its position.
#include "benchmark.h"

static const llamac::Benchmarks embedding_forward = {
    {.operation = "embedding_forward", .absent = {"positions", "place"}}, {.operation = "embedding_forward"}};
