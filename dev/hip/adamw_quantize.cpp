// AdamW that also writes the new weight in fp8, rounded stochastically.
#include "benchmark.h"

static const llamac::Benchmarks adamw_quantize = {{.operation = "adamw_quantize", .absent = {"master"}}};
