// A product in fp8.
#include "benchmark.h"

static const llamac::Benchmarks scaled_matmul = {{.operation = "scaled_matmul"}};
