// Of half the vocabulary.
#include "benchmark.h"

static const llamac::Benchmarks softmax_parts = {
    {.operation = "softmax_parts", .widths_8b = "N=4096,V=64128"}};
