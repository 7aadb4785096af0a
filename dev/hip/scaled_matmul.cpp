// A product in fp8.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "scaled_matmul"}};
