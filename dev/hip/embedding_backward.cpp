// Embedding, backward: rows of equal tokens added in order.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "embedding_backward"}};
