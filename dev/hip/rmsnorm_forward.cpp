// RMSNorm.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "rmsnorm_forward"}};
