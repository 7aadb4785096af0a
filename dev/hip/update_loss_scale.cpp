// The loss's scale after a step.
#include "benchmark.h"

static const llamac::Benchmarks update_loss_scale = {{.operation = "update_loss_scale", .widths_8b = "P=1"}};
