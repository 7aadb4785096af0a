// LayerNorm.
#include "benchmark.h"

static const llamac::Benchmarks layernorm_forward = {{.operation = "layernorm_forward"}};
