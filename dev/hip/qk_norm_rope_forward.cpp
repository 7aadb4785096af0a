// QK norm with RoPE: queries and keys of Qwen3 8B.
#include "benchmark.h"

static const llamac::Benchmarks qk_norm_rope_forward = {
    {.operation = "qk_norm_rope_forward", .widths_8b = "B=1,T=8192,NH=32"},
    {.operation = "qk_norm_rope_forward", .widths_8b = "B=1,T=8192,NH=8"}};
