// The gradients of a group's heads, added.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "repeat_kv_backward"}};
