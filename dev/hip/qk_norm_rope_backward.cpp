// QK norm with RoPE, backward: queries and keys of Qwen3 8B.
#include "benchmark.h"

static const llamac::Benchmarks qk_norm_rope_backward = {
    {.operation = "qk_norm_rope_backward", .widths_8b = "B=1,T=8192,NH=32"},
    {.operation = "qk_norm_rope_backward", .widths_8b = "B=1,T=8192,NH=8"}};
