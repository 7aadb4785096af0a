// The scales of fp8 from maxima.
#include "benchmark.h"

static const llamac::Benchmarks update_scales = {{.operation = "update_scales", .widths_8b = "P=1024"}};
