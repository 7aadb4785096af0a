// Attention of the token for which a cache has room left, to all before it.
#include "benchmark.h"

static const llamac::Benchmarks attention_decode = {
    {.operation = "attention_decode", .widths_8b = "B=1", .first = {"begin"}, .last = {"end"}}};
