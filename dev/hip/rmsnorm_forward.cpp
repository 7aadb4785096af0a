// RMSNorm.
#include "benchmark.h"

static const llamac::Benchmarks rmsnorm_forward = {{.operation = "rmsnorm_forward"}};
