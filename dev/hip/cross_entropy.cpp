// Cross-entropy with its gradient in the logits' place.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "cross_entropy",
                                                            .absent = {"dlosses", "mean", "num_valid"},
                                                            .in_place = {"dlogits", "logits"},
                                                            .widths_8b = "N=4096"}};
