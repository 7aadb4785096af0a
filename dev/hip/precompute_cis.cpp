// The table of RoPE's angles, at Llama 3.1's longest context.
#include "benchmark.h"

static const llamac::Benchmarks precompute_cis = {{.operation = "precompute_cis", .widths_8b = "T=131072"}};
