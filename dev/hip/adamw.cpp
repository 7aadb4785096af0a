// AdamW: weights rounded stochastically, and with fp32 master weights.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "adamw", .absent = {"master"}},
                                                           {.operation = "adamw"}};
