// Quantization to fp8, transposed too, with the maximum.
#include "benchmark.h"

static const llamac::Benchmarks quantize = {{.operation = "quantize"}};
