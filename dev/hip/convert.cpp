// Conversion between storage types.
#include "benchmark.h"

static const llamac::Benchmarks convert = {{.operation = "convert"}};
