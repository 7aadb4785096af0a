// Initial weights.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "fill_normal"}};
