// GELU of a sum with a bias.
#include "benchmark.h"

static const llamac::Benchmarks gelu_forward = {{.operation = "gelu_forward"}};
