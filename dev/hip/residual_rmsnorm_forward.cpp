// RMSNorm fused with the residual add before it.
#include "benchmark.h"

static const llamac::Benchmarks residual_rmsnorm_forward = {{.operation = "residual_rmsnorm_forward"}};
