// Rotary position embedding, backward.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "rope_backward"}};
