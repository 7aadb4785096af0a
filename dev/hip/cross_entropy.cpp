// Cross-entropy with its gradient in the logits' place.
#include "benchmark.h"

static const llamac::Benchmarks cross_entropy = {{.operation = "cross_entropy",
                                                  .absent = {"dlosses", "mean", "num_valid"},
                                                  .in_place = {"dlogits", "logits"},
                                                  .widths_8b = "N=4096"}};
