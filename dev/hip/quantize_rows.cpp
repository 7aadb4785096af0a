// Quantization to fp8 with a scale per row.
#include "benchmark.h"

static const llamac::Benchmarks quantize_rows = {{.operation = "quantize_rows"}};
