// RMSNorm, backward: alone, and with the gradient that passes the norm added.
#include "benchmark.h"

static const llamac::Benchmarks rmsnorm_backward = {
    {.operation = "rmsnorm_backward", .absent = {"out", "dresidual"}},
    {.operation = "rmsnorm_backward", .absent = {"out"}}};
