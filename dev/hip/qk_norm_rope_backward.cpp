// QK norm with RoPE, backward: queries and keys of Qwen3 8B, and of OLMo 2 7B: one norm of all heads.
#include "benchmark.h"

static const llamac::Benchmarks qk_norm_rope_backward = {
    {.operation = "qk_norm_rope_backward", .widths_8b = "B=1,T=8192,NH=32"},
    {.operation = "qk_norm_rope_backward", .widths_8b = "B=1,T=8192,NH=8"},
    {.operation = "qk_norm_rope_backward", .absent = {"cis"}, .widths_8b = "B=1,T=8192,NH=1,HD=4096"}};
