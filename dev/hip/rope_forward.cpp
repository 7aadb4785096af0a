// Rotary position embedding, half-split pairs.
#include "benchmark.h"

static const llamac::Benchmarks rope_forward = {{.operation = "rope_forward"}};
