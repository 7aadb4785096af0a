#include "model/activations.h"

#include <algorithm>

#include "model/block.h"

namespace llamac {
namespace {

const char* group_of(Lifetime until) {
    const char* groups[] = {"tokens", "activations", "activation gradients"};
    return groups[static_cast<int>(until)];
}

// Rows of a chunk of logits, for at most `bytes`: chunks of the same size, of rows that fill tiles of a product.
int64_t chunk_rows(int64_t row_bytes, int64_t rows, int64_t bytes, int64_t multiple) {
    constexpr int64_t tile = 128;
    const int64_t max_rows = std::min(std::max(bytes / row_bytes / multiple, int64_t{1}) * multiple, rows);
    const int64_t chunks = (rows + max_rows - 1) / max_rows;
    const int64_t even = (rows + chunks - 1) / chunks;
    return std::min(max_rows, (even + tile - 1) / tile * tile);
}

// The logits are used before the blocks' gradients are made: they begin in their memory, and end in some of their own
// where that is small. The head's gradient is a sum over chunks. Each after the first reads and writes the whole of it
// once more, so the target is two. Each also rounds it to its type: eight such errors come to about twice that of
// one.
void plan_logits(Activations& a, const Config& config, int64_t bytes, int64_t multiple, bool training,
                 Arena& arena) {
    constexpr int64_t max_chunks = 8, min_bytes = int64_t{64} << 20, ample_bytes = int64_t{2} << 30;
    const int64_t rows = a.tokens.elements(), row_bytes = config.padded_V() * size_of(a.embedding.dtype);
    if (!training)
        return arena.plan(
            "logits", &a.logits,
            shaped(a.embedding.dtype,
                   {chunk_rows(row_bytes, rows, bytes ? bytes : min_bytes, 1), config.padded_V()}));
    const int64_t free = a.dqkv.bytes() + a.dattention.bytes() + a.dgate_up.bytes() + a.dswiglu.bytes();
    const int64_t half = (rows + 1) / 2 * row_bytes, share = (rows + max_chunks - 1) / max_chunks * row_bytes;
    if (!bytes) bytes = std::max({free, share, min_bytes, std::min(half, ample_bytes)});
    const Tensor logits =
        shaped(a.embedding.dtype, {chunk_rows(row_bytes, rows, bytes, multiple), config.padded_V()});
    arena.share(&a.logits, logits, &a.dqkv);
    if (logits.bytes() > free)
        arena.plan("logits", &a.more_logits, shaped(DType::i32, {(logits.bytes() - free + 3) / 4}));
}

// The transposed of a matrix, as codes of fp8.
Tensor codes_of(const Tensor& values, DType type) {
    return shaped(type, {values.shape[1], values.shape[0]});
}

// The planned memory under the shape of this batch.
void set_shape(Tensor& t, const Tensor& like) {
    void* const data = t.data;
    t = like;
    t.data = data;
}

}  // namespace

void plan_activations(const std::vector<Activations*>& in_flight, const Config& config, const ModelOptions& o,
                      const std::vector<LayerRange>& layers, const Fp8Blocks& fp8, Arena& arena) {
    const int64_t B = o.batch_size, T = o.own_len();
    const DType dtype = o.precision.weights;
    const bool training = o.training;
    const bool head = layers.back().end == config.L;
    Activations& a = *in_flight.front();
    for (const auto& row : model_activations(config, B, T, dtype, o.document_mask, head, o.predicted_rows))
        for (Activations* each : in_flight) {
            if (!row.present || (!training && row.until == Lifetime::layer)) continue;
            if (each != &a && row.until == Lifetime::layer)
                arena.share(&(each->*row.member), row.like, &(a.*row.member));
            else
                arena.plan(group_of(row.until), &(each->*row.member), row.like);
        }
    if (head)
        plan_logits(a, config, o.logits_bytes, o.fp8 && o.fp8->head ? fp8_multiple : 1, training, arena);
    for (Activations* each : in_flight) {
        if (head && each != &a) arena.share(&each->logits, a.logits, training ? &a.dqkv : &a.logits);
        each->blocks.resize(static_cast<size_t>(config.L));
        each->inputs.resize(layers.size() - 1);
        for (Tensor& input : each->inputs) arena.plan("activations", &input, each->embedding);
    }
    const auto is_held = [&](int64_t layer) {
        return std::ranges::any_of(
            layers, [&](const LayerRange& chunk) { return layer >= chunk.first && layer < chunk.end; });
    };
    for (const auto& row : block_activations(config, B, T, dtype)) {
        if (!row.present) continue;
        const LinearRow* const reader = reader_of(row.member);
        const bool is_residual = config.output_norm && reader && reader->norm;
        // The first of the tensors that share one memory.
        Tensor *first = row.shares && training ? &(a.*row.shares) : nullptr, *first_codes = nullptr;
        const auto plan = [&](Tensor* tensor, const Tensor& like, bool shares, Tensor*& of) {
            if (shares && of)
                arena.share(tensor, like, of);
            else
                arena.plan(shares && training ? "recomputed activations" : group_of(row.until), tensor, like);
            if (shares && !of) of = tensor;
        };
        for (Activations* each : in_flight)
            for (int64_t layer = 0; layer < config.L; layer++) {
                if (!is_held(layer)) continue;
                BlockActivations& block = each->blocks[layer];
                const bool in_fp8 = fp8.has(layer),
                           again = is_recomputed(o.recompute, row.member, layer, in_fp8);
                // In fp8 the backward pass reads the codes alone, except attention's values.
                const bool transient = in_fp8 && reader && rewritten_by_backward(reader->input);
                if (!is_residual)
                    plan(&(block.*row.member), row.like, !training || again || transient, first);
                if (in_fp8 && reader)
                    plan(&(block.*reader->x_codes), codes_of(row.like, fp8.codes), again, first_codes);
            }
    }
    if (!config.output_norm) return;
    for (Activations* each : in_flight)
        for (int64_t layer = 0; layer < config.L; layer++) {
            if (!is_held(layer)) continue;
            BlockActivations& block = each->blocks[layer];
            const Tensor& input = block_input(*each, layers, layer);
            arena.share(&block.input_norm, input, &input);
            arena.share(&block.post_norm, block.residual_mid, &block.residual_mid);
        }
}

void reshape_activations(Activations& a, const Config& config, int64_t B, int64_t T) {
    const DType dtype = a.embedding.dtype;
    const int64_t predicted = a.predicted_losses.rank > 0 ? a.predicted_losses.shape[0] : 0;
    for (const auto& row :
         model_activations(config, B, T, dtype, a.first.rank > 0, a.losses.rank > 0, predicted))
        if (row.present) set_shape(a.*row.member, row.like);
    for (Tensor& input : a.inputs) set_shape(input, a.embedding);
    for (const auto& row : block_activations(config, B, T, dtype)) {
        if (!row.present) continue;
        const LinearRow* const reader = reader_of(row.member);
        for (BlockActivations& block : a.blocks) {
            set_shape(block.*row.member, row.like);
            if (reader && (block.*reader->x_codes).data)
                set_shape(block.*reader->x_codes, codes_of(row.like, (block.*reader->x_codes).dtype));
        }
    }
}

}  // namespace llamac
