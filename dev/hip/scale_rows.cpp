// Rows of fp8 dequantized; 8b: the gate and up projections.
#include "benchmark.h"

static const llamac::Benchmarks scale_rows = {{.operation = "scale_rows", .widths_8b = "K=28672,C=4096"}};
