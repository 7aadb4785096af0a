// AdamW: weights rounded stochastically, and with fp32 master weights.
#include "benchmark.h"

static const llamac::Benchmarks adamw = {{.operation = "adamw", .absent = {"master"}},
                                         {.operation = "adamw"}};
