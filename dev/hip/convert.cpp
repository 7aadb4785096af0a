// Conversion between storage types.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "convert"}};
