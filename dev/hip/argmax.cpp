// The likeliest token of one sequence.
#include "benchmark.h"

static const llamac::Benchmarks argmax = {{.operation = "argmax", .widths_8b = "N=1"}};
