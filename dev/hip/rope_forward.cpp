// Rotary position embedding, half-split pairs.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "rope_forward"}};
