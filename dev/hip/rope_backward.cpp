// Rotary position embedding, backward.
#include "benchmark.h"

static const llamac::Benchmarks rope_backward = {{.operation = "rope_backward"}};
