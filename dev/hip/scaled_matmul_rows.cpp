// A product in fp8 with scales per row.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "scaled_matmul_rows"}};
