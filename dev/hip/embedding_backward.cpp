// Embedding, backward: rows of equal tokens added in order.
#include "benchmark.h"

static const llamac::Benchmarks embedding_backward = {{.operation = "embedding_backward"}};
