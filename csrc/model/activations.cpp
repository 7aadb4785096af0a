#include "model/activations.h"

#include <algorithm>

namespace llamac {
namespace {

struct BlockRow {
    Tensor BlockActivations::* slot;
    Tensor like;
    unsigned part;
};

// N = B*T rows. In the order of computation.
std::vector<BlockRow> block_table(const Config& c, int64_t B, int64_t T, DType t) {
    using A = BlockActivations;
    const int64_t N = B * T;
    constexpr unsigned kept = 0;  // four bytes a row, by which a norm's backward writes the norm again
    return {{&A::input_norm, shaped(t, {N, c.C}), input_norm_part},
            {&A::input_rstd, shaped(DType::f32, {N}), kept},
            {&A::qkv, shaped(t, {N, c.qkv_size()}), qkv_part},
            {&A::attention, shaped(t, {N, c.q_size()}), attention_part},
            {&A::lse, shaped(DType::f32, {B, c.NH, T}), attention_part},
            {&A::residual_mid, shaped(t, {N, c.C}), residual_mid_part},
            {&A::post_norm, shaped(t, {N, c.C}), post_norm_part},
            {&A::post_rstd, shaped(DType::f32, {N}), kept},
            {&A::gate_up, shaped(t, {N, 2 * c.F}), gate_up_part},
            {&A::swiglu, shaped(t, {N, c.F}), swiglu_part},
            {&A::residual_out, shaped(t, {N, c.C}), residual_out_part}};
}

struct ModelRow {
    const char* group;
    Tensor Activations::* slot;
    Tensor like;
};

std::vector<ModelRow> model_table(const Config& c, int64_t B, int64_t T, DType t) {
    using A = Activations;
    const int64_t N = B * T;
    const char *kept = "activations", *gradients = "activation gradients";
    return {{"tokens", &A::tokens, shaped(DType::i32, {B, T})},
            {"tokens", &A::targets, shaped(DType::i32, {B, T})},
            {kept, &A::cis, shaped(DType::f32, {T, c.HD / 2, 2})},
            {kept, &A::embedding, shaped(t, {N, c.C})},
            {kept, &A::final_norm, shaped(t, {N, c.C})},
            {kept, &A::final_rstd, shaped(DType::f32, {N})},
            {kept, &A::losses, shaped(DType::f32, {N})},
            {gradients, &A::dresidual, shaped(t, {N, c.C})},
            {gradients, &A::dnorm, shaped(t, {N, c.C})},
            {gradients, &A::dqkv, shaped(t, {N, c.qkv_size()})},
            {gradients, &A::dattention, shaped(t, {N, c.q_size()})},
            {gradients, &A::dgate_up, shaped(t, {N, 2 * c.F})},
            {gradients, &A::dswiglu, shaped(t, {N, c.F})}};
}

// Rows of a chunk of logits, for at most `bytes`: chunks of the same size, of rows that fill tiles of a product.
int64_t chunk_rows(int64_t row_bytes, int64_t rows, int64_t bytes) {
    constexpr int64_t tile = 128;
    const int64_t most = std::clamp<int64_t>(bytes / row_bytes, 1, rows), chunks = (rows + most - 1) / most;
    const int64_t even = (rows + chunks - 1) / chunks;
    return std::min(most, (even + tile - 1) / tile * tile);
}

// The logits are used before the blocks' gradients are made: they begin in their memory, and end in some of their own
// where that is small. The head's gradient is a sum over chunks. Each after the first reads and writes the whole of it
// once more: two are what is aimed at. Each also rounds it to its type: eight such errors come to about twice that of
// one.
void plan_logits(Activations& a, const Config& config, int64_t bytes, Arena& arena) {
    constexpr int64_t most_chunks = 8, least_bytes = int64_t{64} << 20, ample_bytes = int64_t{2} << 30;
    const int64_t rows = a.embedding.shape[0], row_bytes = config.V * size_of(a.embedding.dtype);
    const int64_t free = a.dqkv.bytes() + a.dattention.bytes() + a.dgate_up.bytes() + a.dswiglu.bytes();
    const int64_t half = (rows + 1) / 2 * row_bytes,
                  share = (rows + most_chunks - 1) / most_chunks * row_bytes;
    if (!bytes) bytes = std::max({free, share, least_bytes, std::min(half, ample_bytes)});
    const Tensor logits = shaped(a.embedding.dtype, {chunk_rows(row_bytes, rows, bytes), config.V});
    arena.share(&a.logits, logits, &a.dqkv);
    if (logits.bytes() > free)
        arena.plan("logits", &a.more_logits, shaped(DType::i32, {(logits.bytes() - free + 3) / 4}));
}

// The planned memory under the shape of this batch.
void set_shape(Tensor& t, const Tensor& like, void* data) {
    t = like;
    t.data = data;
}

}  // namespace

unsigned recomputed_parts(const Recompute& r, int64_t layer) {
    if (r.block_every && layer % r.block_every == 0) return all_parts & ~residual_out_part;
    return (r.norm ? input_norm_part | post_norm_part : 0u) | (r.qkv ? qkv_part : 0u) |
           (r.attention ? attention_part : 0u) | (r.swiglu ? swiglu_part : 0u);
}

void plan_activations(Activations& a, const Config& config, int64_t B, int64_t T, DType dtype,
                      const Recompute& recompute, int64_t logits_bytes, Arena& arena) {
    for (const ModelRow& row : model_table(config, B, T, dtype))
        arena.plan(row.group, &(a.*row.slot), row.like);
    plan_logits(a, config, logits_bytes, arena);
    a.blocks.resize(static_cast<size_t>(config.L));
    for (const BlockRow& row : block_table(config, B, T, dtype)) {
        // Of those that share one memory. swiglu's backward writes it where it has read dswiglu.
        Tensor* first = row.slot == &BlockActivations::swiglu ? &a.dswiglu : nullptr;
        for (int64_t layer = 0; layer < config.L; layer++) {
            Tensor* const tensor = &(a.blocks[static_cast<size_t>(layer)].*row.slot);
            const bool shares = recomputed_parts(recompute, layer) & row.part;
            if (shares && first)
                arena.share(tensor, row.like, first);
            else
                arena.plan(shares ? "recomputed activations" : "activations", tensor, row.like);
            if (shares && !first) first = tensor;
        }
    }
}

void reshape_activations(Activations& a, const Config& config, int64_t B, int64_t T) {
    const DType dtype = a.embedding.dtype;
    for (const ModelRow& row : model_table(config, B, T, dtype))
        set_shape(a.*row.slot, row.like, (a.*row.slot).data);
    for (const BlockRow& row : block_table(config, B, T, dtype))
        for (BlockActivations& block : a.blocks) set_shape(block.*row.slot, row.like, (block.*row.slot).data);
}

}  // namespace llamac
