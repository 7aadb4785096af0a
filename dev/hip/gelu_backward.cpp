// GELU of a sum with a bias, backward.
#include "benchmark.h"

static const llamac::Benchmarks gelu_backward = {{.operation = "gelu_backward", .absent = {"out"}}};
