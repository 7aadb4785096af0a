// The factor of the losses' gradients, scaled.
#include "benchmark.h"

static const llamac::Benchmarks scale_loss = {{.operation = "scale_loss", .widths_8b = "P=1"}};
