// Embedding: a row of the table for every token.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "embedding_forward"}};
