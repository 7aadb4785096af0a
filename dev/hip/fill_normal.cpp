// Initial weights.
#include "benchmark.h"

static const llamac::Benchmarks fill_normal = {{.operation = "fill_normal"}};
