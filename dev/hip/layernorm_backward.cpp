// LayerNorm, backward: alone, and with the gradient that passes the norm added.
#include "benchmark.h"

static const llamac::Benchmarks layernorm_backward = {
    {.operation = "layernorm_backward", .absent = {"out", "bias", "dresidual"}},
    {.operation = "layernorm_backward", .absent = {"out", "bias"}}};
