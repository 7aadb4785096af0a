// Cross-entropy with its gradient in the logits' place, of half the vocabulary.
#include "benchmark.h"

static const llamac::Benchmarks cross_entropy_parts = {{.operation = "cross_entropy_parts",
                                                        .absent = {"dlosses"},
                                                        .in_place = {"dlogits", "logits"},
                                                        .widths_8b = "N=4096,V=64128"}};
