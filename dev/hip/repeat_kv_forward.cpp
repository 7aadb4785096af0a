// Key/value heads repeated for their query heads.
#include "benchmark.h"

static const llamac::Benchmarks repeat_kv_forward = {{.operation = "repeat_kv_forward"}};
