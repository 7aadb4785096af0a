// The table of activations: names, shapes, types and lifetimes. It drives allocation, the debug state and the memory report.
// model/block.h names the operations that compute and read the activations of a block.
#pragma once
#include <string>
#include <vector>

#include "core/arena.h"
#include "model/config.h"
#include "model/options.h"

namespace llamac {

struct BlockActivations {
    Tensor input_norm, input_rstd, input_mean;
    Tensor qkv;  // queries and keys after RoPE, values; with QK norm as the product makes them
    // With QK norm: queries and keys after it and RoPE, [N, (NH+NKV)·HD]; the norm's statistics.
    Tensor qk, q_rstd, k_rstd;
    Tensor attention, lse;
    Tensor attention_out, mlp_out;  // with Config::output_norm: the products whose norms are added
    Tensor residual_mid;
    Tensor post_norm, post_rstd, post_mean;
    Tensor gate_up, swiglu;  // of models without a gate: the up projection alone, and its GELU
    Tensor residual_out;
    // Codes of fp8, [columns, rows], for the gradients of weights: in blocks whose products are in fp8.
    Tensor input_norm_codes, attention_codes, post_norm_codes, swiglu_codes;
};

struct Activations {
    Tensor tokens, targets;
    // With document masks: the first position that each token sees, and where attention is not causal, behind the last.
    Tensor first, end;
    Tensor mask, mask_end;  // `first` and `end` where the batch has them, which attention reads; else none
    // Where few targets count (set_predicted): the rows [M] whose targets count, these targets [M], and each row's place [N] among
    // them; `predicted`: of a batch that has them, else none. What the head reads of these rows and their losses.
    Tensor predicted_ids, predicted, predicted_input, predicted_losses;
    Tensor positions;            // of learned positions: each token's, in its document
    Tensor cis;                  // cosines and sines of RoPE: of the longest sequence, seen as the batch's T
    int64_t cis_len = 0;         // with context parallelism: the T of the sequences that `cis` is for
    Tensor embedding;            // the input of the model's first block
    std::vector<Tensor> inputs;  // those of its later chunks' first blocks
    std::vector<BlockActivations> blocks;
    Tensor final_norm, final_rstd, final_mean;
    Tensor transform, transform_gelu, transform_norm, transform_rstd, transform_mean;  // of BERT's head
    Tensor logits;       // [rows of a chunk, V]; their gradient takes their place
    Tensor more_logits;  // the rest of their memory, directly behind dqkv to dswiglu
    Tensor losses;
    Tensor dresidual, dnorm, dqkv, dattention, dgate_up, dswiglu;  // gradients: one layer's at a time
};

// Until when a tensor holds its value, which is its group in the memory report.
enum class Lifetime : uint8_t { batch, backward, layer };  // layer: the end of one layer's backward pass

template <class Owner>
struct ActivationRow {
    const char* name;  // in the debug state, behind "act." or "dact."; "": not shown
    Tensor Owner::* member;
    Tensor like;  // type and shape
    bool present = true;
    Lifetime until = Lifetime::backward;
    Tensor Activations::* shares = nullptr;  // a gradient in whose memory it is computed again
};

// B sequences of T tokens, N = B*T rows as operations take them, t: storage. In the order of computation.
inline std::vector<ActivationRow<BlockActivations>> block_activations(const Config& c, int64_t B, int64_t T,
                                                                      DType t) {
    using A = BlockActivations;
    const int64_t N = B * T, n = c.stream_rows(N);
    const Tensor rows = shaped(t, {N, c.C}), stream = shaped(t, {n, c.C}),
                 one_per_row = shaped(DType::f32, {n});
    const bool has_means = c.norm == NormKind::layer, outputs = c.output_norm;
    const auto rstd_of = [&](int64_t heads) {
        return c.joint_qk_norm ? shaped(DType::f32, {N}) : shaped(DType::f32, {B, T, heads});
    };
    return {{outputs ? "attention_input" : "input_norm", &A::input_norm, rows},
            {"input_rstd", &A::input_rstd, one_per_row, !outputs},
            {"input_mean", &A::input_mean, one_per_row, has_means},
            {"qkv", &A::qkv, shaped(t, {N, c.qkv_size()})},
            {"", &A::qk, shaped(t, {N, c.q_size() + c.kv_size()}), c.qk_norm},
            {"", &A::q_rstd, rstd_of(c.NH), c.qk_norm},
            {"", &A::k_rstd, rstd_of(c.NKV), c.qk_norm},
            {"attention", &A::attention, shaped(t, {N, c.q_size()})},
            {"attention_lse", &A::lse, shaped(DType::f32, {B, c.NH, T})},
            {"attention_out", &A::attention_out, rows, outputs},
            {"attention_out_rstd", &A::input_rstd, one_per_row, outputs},
            {"residual_mid", &A::residual_mid, stream},
            {outputs ? "mlp_input" : "post_norm", &A::post_norm, rows},
            {"post_rstd", &A::post_rstd, one_per_row, !outputs},
            {"post_mean", &A::post_mean, one_per_row, has_means},
            {"gate_up", &A::gate_up, shaped(t, {N, c.up_size()})},
            // Its backward writes it where it has read dswiglu.
            {c.is_gated() ? "swiglu" : "gelu", &A::swiglu, shaped(t, {N, c.F}), true, Lifetime::backward,
             &Activations::dswiglu},
            {"mlp_out", &A::mlp_out, rows, outputs},
            {"mlp_out_rstd", &A::post_rstd, one_per_row, outputs},
            {"residual_out", &A::residual_out, stream}};
}

inline std::vector<ActivationRow<Activations>> model_activations(const Config& c, int64_t B, int64_t T,
                                                                 DType t, bool document_mask = false,
                                                                 bool head = true, int64_t predicted = 0) {
    using A = Activations;
    const int64_t N = B * T, n = c.stream_rows(N);
    const Tensor rows = shaped(t, {N, c.C}), ids = shaped(DType::i32, {B, T}),
                 one_per_row = shaped(DType::f32, {N});
    const bool learned = c.positions == PositionKind::learned, means = c.norm == NormKind::layer;
    const bool transform = head && c.post_norm;
    return {{"", &A::tokens, ids, true, Lifetime::batch},
            {"", &A::targets, ids, true, Lifetime::batch},
            {"", &A::first, ids, document_mask, Lifetime::batch},
            {"", &A::end, ids, document_mask && !c.causal, Lifetime::batch},
            {"", &A::predicted_ids, shaped(DType::i32, {2 * predicted + N}), predicted > 0, Lifetime::batch},
            {"", &A::predicted_input, shaped(t, {predicted, c.C}), predicted > 0},
            {"", &A::predicted_losses, shaped(DType::f32, {predicted}), predicted > 0},
            {"", &A::positions, ids, learned, Lifetime::batch},
            {"", &A::cis, shaped(DType::f32, {T, c.rotary_size() / 2, 2})},
            {"embedding", &A::embedding, shaped(t, {n, c.C})},
            {"final_norm", &A::final_norm, rows, head},
            {"", &A::final_rstd, shaped(DType::f32, {n}), head},
            {"", &A::final_mean, shaped(DType::f32, {n}), head && means},
            {"transform", &A::transform, rows, transform},
            {"transform_gelu", &A::transform_gelu, rows, transform},
            {"transform_norm", &A::transform_norm, rows, transform},
            {"", &A::transform_rstd, one_per_row, transform},
            {"", &A::transform_mean, one_per_row, transform},
            {"", &A::losses, one_per_row, head},
            {"", &A::dresidual, rows, true, Lifetime::layer},
            {"", &A::dnorm, rows, true, Lifetime::layer},
            {"", &A::dqkv, shaped(t, {N, c.qkv_size()}), true, Lifetime::layer},
            {"", &A::dattention, shaped(t, {N, c.q_size()}), true, Lifetime::layer},
            {"", &A::dgate_up, shaped(t, {N, c.up_size()}), true, Lifetime::layer},
            {"", &A::dswiglu, shaped(t, {N, c.F}), true, Lifetime::layer}};
}

// Plans memory for micro-batches in flight, which share logits, gradients and recomputed activations; layers share the last two.
// Without training, all layers share one memory, logits have their own, and there are no gradients.
void plan_activations(const std::vector<Activations*>& in_flight, const Config& config,
                      const ModelOptions& options, const std::vector<LayerRange>& layers,
                      const Fp8Blocks& fp8, Arena& arena);

// Gives the planned tensors the shapes of a batch that is no larger than planned.
void reshape_activations(Activations& a, const Config& config, int64_t B, int64_t T);

}  // namespace llamac
