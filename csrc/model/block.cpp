#include "model/block.h"

#include <algorithm>
#include <cmath>
#include <ranges>

#include "model/context_parallel.h"
#include "model/linear.h"
#include "model/model.h"
#include "model/tensor_parallel.h"
#include "ops/operations.h"

namespace llamac {
namespace {

// heads [B,T,count,HD] out of joined rows [N,QKV], the first of them at head `first`.
Tensor heads(const Model& m, const Tensor& rows, int64_t first, int64_t count) {
    const int64_t B = m.activations.tokens.shape[0], T = m.activations.tokens.shape[1], HD = m.config.HD;
    const int64_t row = rows.shape[1];
    Tensor t = make_tensor(static_cast<char*>(rows.data) + first * HD * size_of(rows.dtype), rows.dtype,
                           {B, T, count, HD});
    t.stride[0] = T * row;
    t.stride[1] = row;
    return t;
}
// The same as rows [N,count*HD].
Tensor joint_heads(const Model& m, const Tensor& rows, int64_t first, int64_t count) {
    const Tensor apart = heads(m, rows, first, count);
    Tensor t = make_tensor(apart.data, apart.dtype, {apart.shape[0] * apart.shape[1], count * m.config.HD});
    t.stride[0] = apart.stride[1];
    return t;
}
struct Heads {
    Tensor q, k, v;
};
// qk: the rows of queries and keys, which may be qkv's.
Heads split_heads(const Model& m, const Tensor& qk, const Tensor& qkv) {
    const int64_t NH = m.config.NH, NKV = m.config.NKV;
    return {heads(m, qk, 0, NH), heads(m, qk, NH, NKV), heads(m, qkv, NH + NKV, NKV)};
}
// The rows of the queries and keys that attention reads. QK norm's backward reads those of the product, so that they are
// others; a cached pass has no backward, and normalizes in place.
const Tensor& qk_rows(const Model& m, int64_t layer, const CachedRows* cached = nullptr) {
    const BlockActivations& a = m.activations.blocks[layer];
    return m.config.qk_norm && !cached ? a.qk : a.qkv;
}
// The channels of queries and keys that RoPE turns.
Tensor turned_heads(const Model& m, const Tensor& rows) {
    Tensor t = heads(m, rows, 0, m.config.NH + m.config.NKV);
    t.shape[3] = m.config.rotary_size();
    return t;
}
// As attention reads them.
Heads split_heads(const Model& m, int64_t layer, const CachedRows* cached = nullptr) {
    return split_heads(m, qk_rows(m, layer, cached), m.activations.blocks[layer].qkv);
}
// The value or the gradient of a block's activation.
void show_value(const Model& m, const char* kind, int64_t layer, Tensor BlockActivations::* of,
                const Tensor& value) {
    const std::string prefix = kind + std::to_string(layer) + ".";
    m.hook(prefix + name_of(m.config, of), value);
}
void show_heads(const Model& m, const char* kind, int64_t layer, const Heads& h) {
    const std::string prefix = kind + std::to_string(layer) + ".";
    m.hook(prefix + "q", h.q);
    m.hook(prefix + "k", h.k);
    m.hook(prefix + "v", h.v);
}

Tensor attention_heads(const Model& m, const Tensor& attention) {
    return heads(m, attention, 0, m.config.NH);
}
double attention_scale(const Model& m) {
    return 1.0 / std::sqrt(static_cast<double>(m.config.HD));
}

// With QK norm: the queries, and the keys, in a row of qkv and of qk.
struct NormedHeads {
    int64_t first, count;
    const FlatParam& weight;
    Tensor rstd;
};
std::vector<NormedHeads> normed_heads(const Model& m, int64_t layer) {
    if (!m.config.qk_norm) return {};
    const BlockParameters& p = m.parameters.blocks[layer];
    const BlockActivations& a = m.activations.blocks[layer];
    return {{0, m.config.NH, p.q_norm, a.q_rstd}, {m.config.NH, m.config.NKV, p.k_norm, a.k_rstd}};
}

// The queries and keys that attention reads: each normalized, if the model has QK norm, and turned by its position's angle.
// cached: the rows' angles are its own; attention turns those of a decoding pass, unless RoPE turns a part of a head alone.
void normalize_and_rotate(Model& m, int64_t layer, const CachedRows* cached) {
    const BlockActivations& a = m.activations.blocks[layer];
    const bool decodes = cached && cached->is_decode, in_part = m.config.rotary_size() < m.config.HD;
    const bool turns = m.config.positions == PositionKind::rope && (in_part || !decodes);
    const Tensor cis = !turns ? Tensor{} : cached ? cached->cis : m.activations.cis;
    const Tensor& rows = qk_rows(m, layer, cached);
    for (const NormedHeads& part : normed_heads(m, layer))
        if (m.config.joint_qk_norm)
            rmsnorm_forward(m.context, {.out = joint_heads(m, rows, part.first, part.count),
                                        .rstd = part.rstd,
                                        .x = joint_heads(m, a.qkv, part.first, part.count),
                                        .weight = m.parameters.weight(part.weight),
                                        .eps = m.config.eps});
        else
            qk_norm_rope_forward(m.context, {.out = heads(m, rows, part.first, part.count),
                                             .rstd = part.rstd,
                                             .x = heads(m, a.qkv, part.first, part.count),
                                             .weight = m.parameters.weight(part.weight),
                                             .cis = cis,
                                             .eps = m.config.eps});
    if (turns && (m.config.joint_qk_norm || !m.config.qk_norm)) {
        Tensor x = turned_heads(m, rows), angles = cis;
        if (decodes) {  // the sequences' positions are their own
            std::swap(x.shape[0], x.shape[1]);
            angles = cached->cache->own_cis;
            angles.shape[0] = x.shape[1];
        }
        rope_forward(m.context, {.out = x, .x = x, .cis = angles, .interleaved = false});
    }
}

// Keys of the cache [B,positions,NKV,HD], of B sequences from `sequence` on, from position `begin` on; values.
Heads cache_heads(const Model& m, int64_t layer, const KvCache& cache, int64_t sequence, int64_t B,
                  int64_t begin, int64_t end) {
    const Tensor& all = cache.blocks[layer];
    const int64_t NKV = m.config.NKV, HD = m.config.HD, size = size_of(all.dtype);
    Heads seen;
    seen.k =
        make_tensor(static_cast<char*>(all.data) + (sequence * all.stride[0] + begin * all.stride[1]) * size,
                    all.dtype, {B, end - begin, NKV, HD});
    seen.k.stride[0] = all.stride[0], seen.k.stride[1] = all.stride[1];
    seen.v = seen.k;
    seen.v.data = static_cast<char*>(seen.k.data) + NKV * HD * size;
    return seen;
}

// Keys and values of T tokens of one sequence go to the cache; returns all that these tokens see there.
Heads cached_heads(Model& m, int64_t layer, const Heads& rows, const CachedRows& cached) {
    const Heads own = cache_heads(m, layer, *cached.cache, cached.sequence, 1, cached.position, cached.end);
    const int64_t size = size_of(own.k.dtype), width = own.k.stride[1] * size;
    if (!m.context.dry_run)
        copy_rows_async(m.context, own.k.data, width, rows.k.data, rows.k.stride[1] * size, width,
                        rows.k.shape[1]);
    Heads seen = cache_heads(m, layer, *cached.cache, cached.sequence, 1, cached.begin, cached.end);
    seen.q = rows.q;
    return seen;
}

// Heads [B,1,heads,HD] as [B,heads,HD].
Tensor without_time(const Tensor& heads) {
    Tensor t = make_tensor(heads.data, heads.dtype, {heads.shape[0], heads.shape[2], heads.shape[3]});
    t.stride[0] = heads.stride[0];
    return t;
}

// One token of each sequence: RoPE, its place in the cache, and attention.
void attend_decode(Model& m, int64_t layer, const CachedRows& cached) {
    const KvCache& cache = *cached.cache;
    const BlockActivations& a = m.activations.blocks[layer];
    const Heads h = split_heads(m, layer, &cached);
    const int64_t B = h.q.shape[0];
    const Heads all = cache_heads(m, layer, cache, 0, B, 0, cache.size.positions);
    Tensor begin = cache.first;
    begin.shape[0] = B;
    attention_decode(m.context, {.out = without_time(attention_heads(m, a.attention)),
                                 .keys = all.k,
                                 .values = all.v,
                                 .q = without_time(h.q),
                                 .k = without_time(h.k),
                                 .v = without_time(h.v),
                                 .cis = cache.unturned.data ? cache.unturned : cache.cis,
                                 .begin = begin,
                                 .end = cache.last,
                                 .scale = attention_scale(m),
                                 .window = m.config.window_of(layer)});
}

// What attention reads and writes for all rows, or, with context parallelism, for half 0 or 1 of a rank's rows.
struct AttentionRows {
    Heads x;  // queries, and the keys and values that they see
    Tensor out, lse, first;
};
AttentionRows half_of(const Model& m, const AttentionRows& all, int64_t half) {
    const auto [k, v] = keys_of_half(m, half);
    return {{half_of_heads(all.x.q, half), k, v},
            half_of_heads(all.out, half),
            half_of_memory(all.lse, half),
            half_of_memory(all.first, half)};
}
AttentionRows attention_rows(const Model& m, int64_t layer, const Heads& x) {
    const BlockActivations& a = m.activations.blocks[layer];
    return {x, attention_heads(m, a.attention), a.lse, m.activations.mask};
}

void attend(Model& m, int64_t layer, const AttentionRows& rows) {
    attention_forward(m.context, {.out = rows.out,
                                  .lse = rows.lse,
                                  .q = rows.x.q,
                                  .k = rows.x.k,
                                  .v = rows.x.v,
                                  .first = rows.first,
                                  .end = m.activations.mask_end,
                                  .scale = attention_scale(m),
                                  .causal = m.config.causal,
                                  .window = m.config.window_of(layer)});
}

// Attention. RoPE has rotated the queries, except those that normalize_and_rotate() leaves.
void attend(Model& m, int64_t layer, const CachedRows* cached) {
    if (cached && cached->is_decode) return attend_decode(m, layer, *cached);
    AttentionRows all = attention_rows(m, layer, split_heads(m, layer, cached));
    if (cached) {
        all.x = cached_heads(m, layer, all.x, *cached);
        all.first = {};
    } else if (has_pieces(m)) {
        gather_keys(m, all.x.k, all.x.v);
        for (const int64_t half : {0, 1}) attend(m, layer, half_of(m, all, half));
        return;
    }
    attend(m, layer, all);
}

// dx: the gradients of rows.x. dout: that of rows.out.
void attend_backward(Model& m, int64_t layer, const Heads& dx, const Tensor& dout,
                     const AttentionRows& rows) {
    attention_backward(m.context, {.dq = dx.q,
                                   .dk = dx.k,
                                   .dv = dx.v,
                                   .dout = dout,
                                   .out = rows.out,
                                   .lse = rows.lse,
                                   .q = rows.x.q,
                                   .k = rows.x.k,
                                   .v = rows.x.v,
                                   .first = rows.first,
                                   .end = m.activations.mask_end,
                                   .scale = attention_scale(m),
                                   .causal = m.config.causal,
                                   .window = m.config.window_of(layer)});
}

// gathered: a recomputation has just gathered the layer's keys.
void attend_backward(Model& m, int64_t layer, bool gathered) {
    const Activations& d = m.activations;
    const AttentionRows all = attention_rows(m, layer, split_heads(m, layer));
    const Heads dx = split_heads(m, d.dqkv, d.dqkv);
    const Tensor dout = attention_heads(m, d.dattention);
    if (has_pieces(m)) {
        if (!gathered) gather_keys(m, all.x.k, all.x.v);
        for (const int64_t half : {0, 1}) {
            const auto [dk, dv] = key_gradients_of_half(m, half);
            attend_backward(m, layer, {half_of_heads(dx.q, half), dk, dv}, half_of_heads(dout, half),
                            half_of(m, all, half));
        }
        sum_key_gradients(m, dx.k, dx.v);
    } else {
        attend_backward(m, layer, dx, dout, all);
    }
    if (m.hook) show_heads(m, "dact.", layer, dx);
}

// The input of a norm, or the residual that a linear adds.
Tensor residual_of(const Model& m, int64_t layer, const LinearRow& row) {
    if (row.adds_residual && m.config.post_norm) return m.activations.blocks[layer].*(&row - 1)->x;
    return row.residual ? m.activations.blocks[layer].*row.residual : block_input(m, layer);
}

Quantizable input_of(const Model& m, int64_t layer, const LinearRow& row, bool keeps_codes) {
    const BlockActivations& a = m.activations.blocks[layer];
    return linear_input(m, {layer, &row}, a.*row.x, keeps_codes ? a.*row.x_codes : Tensor{});
}

Norm norm_of(const Model& m, int64_t layer, const LinearRow& row) {
    const BlockActivations& a = m.activations.blocks[layer];
    const BlockParameters& p = m.parameters.blocks[layer];
    return {residual_of(m, layer, row), a.*row.statistics, a.*row.mean, p.*row.norm, p.*row.norm_bias};
}

// With Config::output_norm, of a linear that adds the residual: the norm of its product.
bool norms_output(const Model& m, const LinearRow& row) {
    return m.config.output_norm && row.adds_residual;
}
const Tensor& product_of(const Model& m, int64_t layer, const LinearRow& row) {
    return m.activations.blocks[layer].*(norms_output(m, row) ? row.derived[0] : row.out);
}
Norm output_norm_of(const Model& m, int64_t layer, const LinearRow& row) {
    Norm norm = norm_of(m, layer, *(&row - 1));
    norm.x = product_of(m, layer, row);
    return norm;
}
// out = residual + norm(product)
void add_normed(Model& m, int64_t layer, const LinearRow& row) {
    const Tensor& out = m.activations.blocks[layer].*row.out;
    norm_forward(m, out, output_norm_of(m, layer, row));
    scale_rows(m.context, {.out = out, .x = residual_of(m, layer, row), .scale = 1.0, .accumulate = true});
}
// The gradient of a linear's product.
const Tensor& product_gradient(const Model& m, const LinearRow& row) {
    return m.activations.*(norms_output(m, row) ? &Activations::dnorm : row.dout);
}

// The values of a linear's input.
void compute_input(Model& m, int64_t layer, const LinearRow& row, const CachedRows* cached) {
    const BlockActivations& a = m.activations.blocks[layer];
    switch (row.input) {
    case Producer::norm:
        if (m.config.output_norm) return;  // it is the residual
        norm_forward(m, own_rows(m, a.*row.x), norm_of(m, layer, row));
        return gather_rows(m, a.*row.x);
    case Producer::attention:
        return attend(m, layer, cached);
    case Producer::activation:
        if (m.config.is_gated()) return swiglu_forward(m.context, {.out = a.*row.x, .gate_up = a.gate_up});
        return gelu_forward(m.context, {.out = a.*row.x, .x = a.gate_up, .tanh = has_tanh(m)});
    }
}

// The bias of a linear; null: the model has none there.
const FlatParam* bias_of(const Model& m, int64_t layer, const LinearRow& row) {
    const FlatParam& bias = m.parameters.blocks[layer].*row.bias;
    return bias.shape.empty() ? nullptr : &bias;
}

// Whether the operation that computes a linear's input, or the gradient of its output, writes codes and no values: SwiGLU and its
// backward, and RoPE's backward where nothing else reads its output.
bool input_as_codes(const Model& m, int64_t layer, const LinearRow& row) {
    return row.input == Producer::activation && m.config.is_gated() && computes_codes(m, layer);
}
bool gradient_as_codes(const Model& m, int64_t layer, const LinearRow& row) {
    const bool has_readers = bias_of(m, layer, row) || (feeds(row, Producer::attention) &&
                                                        (m.config.qk_norm || m.config.rotary_factor < 1));
    return !row.adds_residual && !has_readers && computes_codes(m, layer);
}

// The codes of a linear's input, from its values or by the operation that computes it.
void quantize_input(Model& m, int64_t layer, const LinearRow& row, const Quantizable& x, bool again) {
    if (!input_as_codes(m, layer, row)) return quantize(m, x, again);
    const Fp8Codes to = codes_of(m, x, again);
    swiglu_forward_quantize(m.context, {.out = to.out,
                                        .transposed = to.transposed,
                                        .amax = to.amax,
                                        .saturated = to.saturated,
                                        .gate_up = m.activations.blocks[layer].gate_up,
                                        .scale = to.scale});
}

// The gradients of the linear's queries and keys, from those of attention's, in place.
void normalize_and_rotate_backward(Model& m, int64_t layer, bool accumulate) {
    const Tensor &dqkv = m.activations.dqkv, &cis = m.activations.cis;
    if (m.config.positions == PositionKind::rope && (m.config.joint_qk_norm || !m.config.qk_norm)) {
        const Tensor dx = turned_heads(m, dqkv);
        rope_backward(m.context, {.dx = dx, .dout = dx, .cis = cis, .interleaved = false});
    }
    const Tensor& qkv = m.activations.blocks[layer].qkv;
    for (const NormedHeads& part : normed_heads(m, layer))
        if (m.config.joint_qk_norm) {
            const Tensor dx = joint_heads(m, dqkv, part.first, part.count);
            rmsnorm_backward(m.context, {.dx = dx,
                                         .dweight = m.parameters.gradient(part.weight),
                                         .dout = dx,
                                         .x = joint_heads(m, qkv, part.first, part.count),
                                         .weight = m.parameters.weight(part.weight),
                                         .rstd = part.rstd,
                                         .accumulate = accumulate});
        } else {
            const Tensor dx = heads(m, dqkv, part.first, part.count);
            qk_norm_rope_backward(m.context, {.dx = dx,
                                              .dweight = m.parameters.gradient(part.weight),
                                              .dout = dx,
                                              .x = heads(m, qkv, part.first, part.count),
                                              .weight = m.parameters.weight(part.weight),
                                              .rstd = part.rstd,
                                              .cis = cis,
                                              .accumulate = accumulate});
        }
    if (m.fp8 && m.hook) m.hook("dact." + std::to_string(layer) + ".qkv", dqkv);  // as it is quantized
}

// The codes of the gradient of a linear's output, from its values or by the backward of RoPE or of the activation.
void quantize_gradient(Model& m, int64_t layer, const LinearRow& row, const Quantizable& dout) {
    if (!gradient_as_codes(m, layer, row)) return quantize(m, dout, false);
    const Activations& d = m.activations;
    const Fp8Codes to = codes_of(m, dout, false);
    if (feeds(row, Producer::activation))
        return swiglu_backward_quantize(m.context, {.out = to.out,
                                                    .transposed = to.transposed,
                                                    .amax = to.amax,
                                                    .saturated = to.saturated,
                                                    .dout = d.dswiglu,
                                                    .gate_up = d.blocks[layer].gate_up,
                                                    .scale = to.scale});
    const int64_t N = d.dqkv.shape[0], HD = m.config.HD, heads = d.dqkv.shape[1] / HD;
    rope_backward_quantize(m.context, {.out = reshape(to.out, {N, heads, HD}),
                                       .transposed = reshape(to.transposed, {heads, HD, N}),
                                       .amax = to.amax,
                                       .saturated = to.saturated,
                                       .dout = reshape(d.dqkv, {N, heads, HD}),
                                       .cis = d.cis,
                                       .scale = to.scale,
                                       .rotated = m.config.NH + m.config.NKV});
}

// Where the gradient of a linear's input is. With post-norm, a sum that adds a norm's output has left its gradient in dresidual,
// and the linear that reads the output adds its own.
const Tensor& input_gradient(const Model& m, const LinearRow& row) {
    return row.norm && m.config.post_norm ? m.activations.dresidual : m.activations.*row.dx;
}

// The backward of the operation that computes a linear's input, from its gradient row.dx. again: what a recomputation has computed.
// rewrites: also rewrites the input.
void backward_producer(Model& m, int64_t layer, const LinearRow& row, const Recomputed& again, bool rewrites,
                       bool accumulate) {
    const BlockActivations& a = m.activations.blocks[layer];
    const Activations& d = m.activations;
    const Tensor written = rewrites ? a.*row.x : Tensor{};
    switch (row.input) {
    case Producer::norm:
        if (m.config.output_norm) {
            scale_rows(m.context, {.out = d.dresidual, .x = d.dnorm, .scale = 1.0, .accumulate = true});
            return show_gradient(m, layer, row.x, d.dresidual);
        }
        norm_backward(m, d.dresidual, norm_of(m, layer, row), own_rows(m, input_gradient(m, row)),
                      !m.config.post_norm, own_rows(m, written), accumulate);
        return rewrites ? gather_rows(m, written) : void();
    case Producer::attention:
        return attend_backward(m, layer, again.input);
    case Producer::activation:
        if (input_as_codes(m, layer, row)) return;  // quantize_gradient() computes the codes of the gradient
        if (m.config.is_gated())
            swiglu_backward(
                m.context, {.dgate_up = d.dgate_up, .out = written, .dout = d.dswiglu, .gate_up = a.gate_up});
        else
            gelu_backward(
                m.context,
                {.dx = d.dgate_up, .out = written, .dout = d.dswiglu, .x = a.gate_up, .tanh = has_tanh(m)});
        return show_gradient(m, layer, &BlockActivations::gate_up, d.dgate_up);
    }
}

// Whether parameters before a block's first product train.
bool trains_input(const Model& m, int64_t layer) {
    const Parameters& p = m.parameters;
    const BlockParameters& block = p.blocks[layer];
    const auto trains = [](const FlatParam& flat) { return !flat.shape.empty() && flat.trains; };
    return p.trains_before(p.segment_of(layer)) ||
           (!m.config.output_norm && (trains(block.input_norm) || trains(block.input_norm_bias)));
}

bool in_fp8(const Model& m, int64_t layer) {
    return m.fp8 && m.fp8->blocks.has(layer);
}

}  // namespace

Recomputed recomputed(const Recompute& r, const LinearRow& row, int64_t layer, bool in_fp8) {
    if (r.block_every && layer % r.block_every == 0) return {true, &row != &block_linears.back()};
    const bool output = r.qkv && row.out == &BlockActivations::qkv;
    switch (row.input) {
    case Producer::norm:
        return {r.norm || (output && in_fp8), output};
    case Producer::attention:
        return {r.attention, output};
    case Producer::activation:
        return {r.swiglu, output};
    }
    return {};
}

const LinearRow* reader_of(Tensor BlockActivations::* activation) {
    for (const LinearRow& row : block_linears)
        if (row.x == activation) return &row;
    return nullptr;
}

const char* name_of(const Config& config, Tensor BlockActivations::* activation) {
    for (const auto& row : block_activations(config, 1, 1, DType::f32))
        if (row.present && row.member == activation) return row.name;
    return "";
}

bool is_recomputed(const Recompute& recompute, Tensor BlockActivations::* activation, int64_t layer,
                   bool in_fp8) {
    for (const LinearRow& row : block_linears) {
        const Recomputed again = recomputed(recompute, row, layer, in_fp8);
        if (row.out == activation || std::ranges::count(row.derived, activation)) return again.output;
        // A norm's backward writes the norm again by its rstd, which is kept.
        if (row.x == activation || (row.statistics == activation && !rewritten_by_backward(row.input)))
            return again.input;
    }
    return false;
}

void norm_forward(Model& m, const Tensor& out, const Norm& norm) {
    const Parameters& p = m.parameters;
    switch (m.config.norm) {
    case NormKind::rms:
        return rmsnorm_forward(m.context, {.out = out,
                                           .rstd = norm.rstd,
                                           .x = norm.x,
                                           .weight = p.weight(norm.weight),
                                           .eps = m.config.eps});
    case NormKind::layer:
        return layernorm_forward(m.context, {.out = out,
                                             .mean = norm.mean,
                                             .rstd = norm.rstd,
                                             .x = norm.x,
                                             .weight = p.weight(norm.weight),
                                             .bias = p.weight(norm.bias),
                                             .eps = m.config.eps});
    }
}

void norm_backward(Model& m, const Tensor& gradient, const Norm& norm, const Tensor& dout, bool adds,
                   const Tensor& out, bool accumulate) {
    const Parameters& p = m.parameters;
    const Tensor dx = own_rows(m, gradient), dresidual = adds ? dx : Tensor{};
    switch (m.config.norm) {
    case NormKind::rms:
        return rmsnorm_backward(m.context, {.dx = dx,
                                            .dweight = p.gradient(norm.weight),
                                            .out = out,
                                            .dout = dout,
                                            .x = norm.x,
                                            .weight = p.weight(norm.weight),
                                            .rstd = norm.rstd,
                                            .dresidual = dresidual,
                                            .accumulate = accumulate});
    case NormKind::layer:
        return layernorm_backward(m.context, {.dx = dx,
                                              .dweight = p.gradient(norm.weight),
                                              .dbias = p.gradient(norm.bias),
                                              .out = out,
                                              .dout = dout,
                                              .x = norm.x,
                                              .weight = p.weight(norm.weight),
                                              .bias = p.weight(norm.bias),
                                              .mean = norm.mean,
                                              .rstd = norm.rstd,
                                              .dresidual = dresidual,
                                              .accumulate = accumulate});
    }
}

bool has_tanh(const Model& m) {
    return m.config.activation == ActivationKind::gelu_tanh;
}

const Tensor& block_input(const Activations& a, const std::vector<LayerRange>& chunks, int64_t layer) {
    for (size_t chunk = 1; chunk < chunks.size(); chunk++)
        if (layer == chunks[chunk].first) return a.inputs[chunk - 1];
    return layer > chunks.front().first ? a.blocks[layer - 1].residual_out : a.embedding;
}
Tensor block_input(const Model& m, int64_t layer) {
    return block_input(m.activations, m.parameters.layers, layer);
}

void forward_block(Model& m, int64_t layer, Run run, const CachedRows* cached) {
    const BlockActivations& a = m.activations.blocks[layer];
    for (const LinearRow& row : block_linears) {
        const Recomputed again = recomputed(m.options.recompute, row, layer, in_fp8(m, layer));
        const bool whole = run != Run::recomputation, multiplies = whole || again.output;
        const bool makes_input = whole || (again.input && (multiplies || !rewritten_by_backward(row.input)));
        // The backward pass reads the codes of this run, unless it runs this once more.
        const bool keeps_codes = run == Run::recomputation || (run == Run::training && !again.input);
        const Quantizable x = input_of(m, layer, row, keeps_codes);
        if (makes_input && !input_as_codes(m, layer, row)) compute_input(m, layer, row, cached);
        if (!multiplies) continue;
        quantize_input(m, layer, row, x, false);
        const FlatParam* const bias = bias_of(m, layer, row);
        // A sum over ranks has the bias in the first one's term; the residual follows.
        const bool sums = row.split == Split::inputs && m.options.tensor.ranks > 1,
                   adds_bias = bias && (!sums || m.options.tensor.rank == 0);
        const bool adds = row.adds_residual && !norms_output(m, row);
        const Tensor out = sums ? terms_of(m, a.*row.out) : product_of(m, layer, row),
                     residual = adds ? residual_of(m, layer, row) : Tensor{};
        const Quantizable weight = linear_weight(m, {layer, &row});
        const Tensor term = sums ? Tensor{} : residual,
                     bias_of_all = adds_bias ? m.parameters.weight(*bias) : Tensor{};
        if (has_adapter(m, row))
            lora_forward(m, layer, row, out, a.*row.x, weight.values, term, bias_of_all, !whole);
        else
            linear_forward(m, out, x, weight, term, bias_of_all);
        if (sums) {
            reduce_rows(m, a.*row.out, out);
            scale_rows(m.context, {.out = a.*row.out, .x = residual, .scale = 1.0, .accumulate = true});
        }
        if (norms_output(m, row)) add_normed(m, layer, row);
        if (feeds(row, Producer::attention)) normalize_and_rotate(m, layer, cached);
    }
}

void backward_block(Model& m, int64_t layer, bool accumulate) {
    const Activations& d = m.activations;
    const BlockActivations& a = d.blocks[layer];
    for (const LinearRow& row : std::views::reverse(block_linears)) {
        const Recomputed again = recomputed(m.options.recompute, row, layer, in_fp8(m, layer));
        const Tensor& dproduct = product_gradient(m, row);
        if (norms_output(m, row)) {
            norm_backward(m, dproduct, output_norm_of(m, layer, row), d.*row.dout, false, {}, accumulate);
            show_gradient(m, layer, row.derived[0], dproduct);
        }
        if (row.split == Split::inputs) gather_rows(m, dproduct);
        const Quantizable dout = output_gradient(m, {layer, &row}, dproduct),
                          weight = linear_weight(m, {layer, &row});
        if (feeds(row, Producer::attention) && !gradient_as_codes(m, layer, row))
            normalize_and_rotate_backward(m, layer, accumulate);
        if (const FlatParam* const bias = bias_of(m, layer, row); bias && bias->trains)
            bias_backward(
                m.context,
                {.dbias = m.parameters.gradient(*bias), .dout = dproduct, .accumulate = accumulate});
        quantize_gradient(m, layer, row, dout);
        const bool rewrites = again.input_alone() && rewritten_by_backward(row.input);
        // Nothing reads the gradient of the input of the first block that trains, unless its norm trains.
        const bool reaches = &row != block_linears.data() || trains_input(m, layer);
        const Tensor& dx = input_gradient(m, row);
        if (has_adapter(m, row))
            lora_backward_input(m, layer, row, reaches ? dx : Tensor{}, dproduct, weight.values);
        else if (reaches)
            linear_backward_input(m, dx, dout, weight, row.norm && m.config.post_norm);
        if (reaches && row.split == Split::outputs) reduce_rows(m, own_rows(m, dx), dx);
        const bool is_residual =
            row.norm && m.config.output_norm;  // its input, of which nothing is written again
        if (reaches && !is_residual) show_gradient(m, layer, row.x, dx);
        if (reaches || (rewrites && !is_residual))
            backward_producer(m, layer, row, again, rewrites, accumulate);
        Quantizable x = input_of(m, layer, row, true);
        x.rows = {};
        if (again.input_alone()) quantize_input(m, layer, row, x, true);
        const FlatParam& matrix = m.parameters.blocks[layer].*row.weight;
        if (matrix.trains) linear_backward_weight(m, m.parameters.gradient(matrix), dout, x, accumulate);
        if (has_adapter(m, row)) lora_backward_weight(m, layer, row, dproduct, a.*row.x, accumulate);
        if (row.norm && row.residual) show_gradient(m, layer, row.residual, d.dresidual);
    }
}

void show_block(const Model& m, int64_t layer) {
    if (!m.hook) return;
    const BlockActivations& a = m.activations.blocks[layer];
    for (const auto& row : block_activations(m.config, 1, 1, a.qkv.dtype))
        if (row.member == &BlockActivations::qkv)
            show_heads(m, "act.", layer, split_heads(m, layer));
        else if (*row.name && row.present)
            show_value(m, "act.", layer, row.member, a.*row.member);
}
void show_gradient(const Model& m, int64_t layer, Tensor BlockActivations::* of, const Tensor& value) {
    if (!m.hook) return;
    show_value(m, "dact.", layer, of, value);
}

}  // namespace llamac
