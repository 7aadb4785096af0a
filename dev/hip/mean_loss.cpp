// The mean of the losses of rows that count.
#include "benchmark.h"

static const llamac::Benchmarks mean_loss = {{.operation = "mean_loss"}};
