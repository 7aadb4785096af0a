// RMSNorm fused with the residual add before it.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "residual_rmsnorm_forward"}};
