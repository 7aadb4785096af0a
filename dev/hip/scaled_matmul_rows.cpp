// A product in fp8 with scales per row.
#include "benchmark.h"

static const llamac::Benchmarks scaled_matmul_rows = {{.operation = "scaled_matmul_rows"}};
