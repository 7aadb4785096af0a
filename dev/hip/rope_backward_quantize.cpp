// The gradient of queries, keys and values, turned back, in fp8.
#include "benchmark.h"

static const llamac::Benchmarks rope_backward_quantize = {{.operation = "rope_backward_quantize"}};
