// LayerNorm fused with the residual add before it.
#include "benchmark.h"

static const llamac::Benchmarks residual_layernorm_forward = {{.operation = "residual_layernorm_forward"}};
