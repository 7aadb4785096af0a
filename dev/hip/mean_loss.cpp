// The mean of the losses of rows that count.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "mean_loss"}};
