// The gradients of a group's heads, added.
#include "benchmark.h"

static const llamac::Benchmarks repeat_kv_backward = {{.operation = "repeat_kv_backward"}};
