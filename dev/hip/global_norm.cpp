// The norm of all gradients.
#include "benchmark.h"

static const llamac::Benchmarks global_norm = {{.operation = "global_norm"}};
