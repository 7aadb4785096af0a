// The scales of fp8 from maxima.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {
    {.operation = "update_scales", .widths_8b = "P=1024"}};
