// Quantisation to fp8, transposed too, with the maximum.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "quantize"}};
