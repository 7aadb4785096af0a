// Embedding: a row of the table for every token.
#include "benchmark.h"

static const llamac::Benchmarks embedding_forward = {{.operation = "embedding_forward"}};
