// AdamW that also writes the new weight in fp8, rounded stochastically.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {
    {.operation = "adamw_quantize", .absent = {"master"}}};
