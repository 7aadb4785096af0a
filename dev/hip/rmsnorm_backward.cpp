// RMSNorm, backward: alone, and with the gradient that passes the norm added.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {
    {.operation = "rmsnorm_backward", .absent = {"out", "dresidual"}},
    {.operation = "rmsnorm_backward", .absent = {"out"}}};
