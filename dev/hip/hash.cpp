// The hash of a tensor's memory.
#include "benchmark.h"

static const llamac::Benchmarks hash = {{.operation = "hash"}};
