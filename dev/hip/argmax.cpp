// The likeliest token of one sequence.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "argmax", .widths_8b = "N=1"}};
