// Quantisation to fp8 with a scale per row.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "quantize_rows"}};
