// The microbenchmarks: a program per operation, in this order. Without widths, those of the preset.
#include "benchmark.h"

namespace llamac {

const std::vector<Benchmark> benchmarks = {
    {.operation = "adamw", .absent = {"master"}},  // weights rounded stochastically
    {.operation = "adamw"},
    {.operation = "adamw_quantize", .absent = {"master"}},
    {.operation = "argmax", .widths_8b = "N=1"},  // of one sequence
    {.operation = "attention_backward", .absent = {"first", "end"}},
    {.operation = "attention_decode",
     .widths_8b = "B=1",
     .first = {"begin"},
     .last = {"end"}},  // a full cache
    {.operation = "attention_forward", .absent = {"first", "end"}},
    // Queries, keys and values of Qwen2 7B.
    {.operation = "bias_backward", .widths_8b = "N=8192,K=4608"},
    {.operation = "bias_forward", .in_place = {"out", "x"}, .widths_8b = "N=8192,K=4608"},
    {.operation = "convert"},
    {.operation = "cross_entropy",
     .absent = {"dlosses", "mean", "num_valid"},
     .in_place = {"dlogits", "logits"},
     .widths_8b = "N=4096"},
    // Half the vocabulary.
    {.operation = "cross_entropy_parts",
     .absent = {"dlosses"},
     .in_place = {"dlogits", "logits"},
     .widths_8b = "N=4096,V=64128"},
    {.operation = "embedding_backward"},
    {.operation = "embedding_forward", .absent = {"positions", "place"}},
    {.operation = "embedding_forward"},
    {.operation = "fill_normal"},
    {.operation = "gelu_backward", .absent = {"out"}},
    {.operation = "gelu_forward"},
    {.operation = "global_norm"},
    {.operation = "hash"},
    // Alone, and with the gradient that passes the norm added.
    {.operation = "layernorm_backward", .absent = {"out", "bias", "dresidual"}},
    {.operation = "layernorm_backward", .absent = {"out", "bias"}},
    {.operation = "layernorm_forward"},
    {.operation = "matmul_backward_input", .widths_8b = "N=8192,C=8192,K=8192"},
    {.operation = "matmul_backward_weight", .widths_8b = "N=8192,C=8192,K=8192"},
    {.operation = "matmul_forward", .absent = {"residual", "bias"}, .widths_8b = "N=8192,C=8192,K=8192"},
    {.operation = "mean_loss"},
    {.operation = "precompute_cis", .widths_8b = "T=131072"},  // Llama 3.1's longest context
    // Queries and keys of Qwen3 8B.
    {.operation = "qk_norm_rope_backward", .widths_8b = "B=1,T=8192,NH=32"},
    {.operation = "qk_norm_rope_backward", .widths_8b = "B=1,T=8192,NH=8"},
    {.operation = "qk_norm_rope_forward", .widths_8b = "B=1,T=8192,NH=32"},
    {.operation = "qk_norm_rope_forward", .widths_8b = "B=1,T=8192,NH=8"},
    {.operation = "quantize"},
    {.operation = "quantize_rows"},
    {.operation = "repeat_kv_backward"},
    {.operation = "repeat_kv_forward"},
    {.operation = "residual_layernorm_forward"},
    {.operation = "residual_rmsnorm_forward"},
    {.operation = "rmsnorm_backward", .absent = {"out", "dresidual"}},
    {.operation = "rmsnorm_backward", .absent = {"out"}},
    {.operation = "rmsnorm_forward"},
    {.operation = "rope_backward"},
    {.operation = "rope_backward_quantize"},
    {.operation = "rope_forward"},
    {.operation = "scale_loss", .widths_8b = "P=1"},
    {.operation = "scale_rows", .widths_8b = "K=28672,C=4096"},  // the gate and up projections
    {.operation = "scaled_matmul"},
    {.operation = "scaled_matmul_rows"},
    {.operation = "softmax_parts", .widths_8b = "N=4096,V=64128"},  // half the vocabulary
    {.operation = "swiglu_backward", .absent = {"out"}},
    {.operation = "swiglu_backward_quantize"},
    {.operation = "swiglu_forward"},
    {.operation = "swiglu_forward_quantize"},
    {.operation = "token_positions", .widths_8b = "B=8,T=8192"},
    {.operation = "update_loss_scale", .widths_8b = "P=1"},
    {.operation = "update_scales", .widths_8b = "P=1024"},
};

}  // namespace llamac
