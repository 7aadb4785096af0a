// The gradient of queries, keys and values, turned back, in fp8.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "rope_backward_quantize"}};
