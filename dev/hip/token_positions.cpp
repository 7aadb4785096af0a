// The positions of a batch of packed documents.
#include "benchmark.h"

static const llamac::Benchmarks token_positions = {
    {.operation = "token_positions", .widths_8b = "B=8,T=8192"}};
