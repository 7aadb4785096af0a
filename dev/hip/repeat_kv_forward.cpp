// Key/value heads repeated for their query heads.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "repeat_kv_forward"}};
