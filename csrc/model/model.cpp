#include "model/model.h"

#include <cmath>
#include <numeric>

#include "model/exchange.h"
#include "model/optimizer.h"
#include "ops/operations.h"
#include "platform/ranges.h"

namespace llamac {
namespace {

void show(const Model& m, const std::string& name, const Tensor& value) {
    if (m.hook) m.hook(name, value);
}
// kind: "act" for the value of the activation, "dact" for its gradient.
void show(const Model& m, const std::string& kind, Tensor Activations::* activation, const Tensor& value) {
    if (!m.hook) return;
    for (const auto& row : model_activations(m.config, 1, 1, value.dtype))
        if (row.member == activation) m.hook(kind + "." + row.name, value);
}

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
struct Heads {
    Tensor q, k, v;
};
Heads split_heads(const Model& m, const Tensor& qkv) {
    const int64_t NH = m.config.NH, NKV = m.config.NKV;
    return {heads(m, qkv, 0, NH), heads(m, qkv, NH, NKV), heads(m, qkv, NH + NKV, NKV)};
}
// The value or the gradient of a block's activation; queries, keys and values one by one.
void show_row(const Model& m, const char* kind, int64_t layer, const ActivationRow<BlockActivations>& row,
              const Tensor& value) {
    const std::string prefix = kind + std::to_string(layer) + ".";
    if (row.member != &BlockActivations::qkv) return m.hook(prefix + row.name, value);
    for (const HeadRange& range : head_ranges(m.config))
        m.hook(prefix + range.name, heads(m, value, range.first, range.count));
}
Tensor attention_heads(const Model& m, const Tensor& attention) {
    return heads(m, attention, 0, m.config.NH);
}
double attention_scale(const Model& m) {
    return 1.0 / std::sqrt(static_cast<double>(m.config.HD));
}

Tensor residual_in(const Model& m, int64_t layer) {
    return layer ? m.activations.blocks[layer - 1].residual_out : m.activations.embedding;
}

// The parts of a block that the backward pass computes again.
unsigned again_parts(const Model& m, int64_t layer) {
    return recomputed_parts(m.options.recompute, layer, m.fp8 && m.fp8->blocks.has(layer));
}

TensorMaker norm_maker(Model& m, const Tensor& out, const Tensor& rstd, const Tensor& x,
                       const Placement& of) {
    return {
        [=, &m] {
            rmsnorm_forward(
                m.context,
                {.out = out, .rstd = rstd, .x = x, .weight = m.parameters.weight(of), .eps = m.config.eps});
        },
        {}};
}

TensorMaker swiglu_maker(Model& m, const BlockActivations& a) {
    return {[&m, &a] { swiglu_forward(m.context, {.out = a.swiglu, .gate_up = a.gate_up}); },
            [&m, &a](const Fp8Codes& to) {
                swiglu_forward_quantize(m.context, {.out = to.out,
                                                    .transposed = to.transposed,
                                                    .amax = to.amax,
                                                    .saturated = to.saturated,
                                                    .gate_up = a.gate_up,
                                                    .scale = to.scale});
            }};
}

// Queries and keys, each turned by its position's angle. cached: the rows' angles are its own.
void rotate(Model& m, const Tensor& qkv, const CachedRows* cached) {
    for (const HeadRange& range : rotated_ranges(m.config)) {
        const Tensor x = heads(m, qkv, range.first, range.count);
        rope_forward(
            m.context,
            {.out = x, .x = x, .cis = cached ? cached->cis : m.activations.cis, .interleaved = false});
    }
}

// Keys of the cache [B,positions,NKV,HD], of B sequences from `sequence` on, from position `begin` on; values.
Heads cache_heads(const Model& m, int64_t layer, const KvCache& cache, int64_t sequence, int64_t B,
                  int64_t begin, int64_t end) {
    const Tensor& all = cache.blocks[static_cast<size_t>(layer)];
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
void attend_next(Model& m, int64_t layer, const KvCache& cache) {
    const BlockActivations& a = m.activations.blocks[layer];
    const Heads h = split_heads(m, a.qkv);
    const int64_t B = h.q.shape[0];
    const Heads all = cache_heads(m, layer, cache, 0, B, 0, cache.size.positions);
    Tensor begin = cache.first;
    begin.shape[0] = B;
    attention_next(m.context, {.out = without_time(attention_heads(m, a.attention)),
                               .keys = all.k,
                               .values = all.v,
                               .q = without_time(h.q),
                               .k = without_time(h.k),
                               .v = without_time(h.v),
                               .cis = cache.cis,
                               .begin = begin,
                               .end = cache.last,
                               .scale = attention_scale(m),
                               .window = m.config.window_of(layer)});
}

// Runs the parts of a block that are asked for: all in the forward pass, those thrown away in the backward
// pass.
// codes: the parts whose codes of fp8 the backward pass will read as they are then. cached: where the rows go on from.
void forward_block(Model& m, int64_t layer, unsigned parts, unsigned codes,
                   const CachedRows* cached = nullptr) {
    const Parameters& p = m.parameters;
    const BlockParameters& w = p.blocks[layer];
    const BlockActivations& a = m.activations.blocks[layer];
    const Tensor in = residual_in(m, layer);
    const bool is_next = cached && cached->is_next;
    const auto wanted = [&](unsigned part, const Tensor& of) { return codes & part ? of : Tensor{}; };
    // A norm and swiglu are made with the product that reads them.
    const auto maker = [&](unsigned part, const TensorMaker& of) {
        return parts & part ? of : TensorMaker{};
    };
    if (parts & qkv_part) {
        linear_forward(m, {layer, Layer::qkv, p.weight(w.qkv)}, a.qkv, a.input_norm,
                       wanted(input_norm_part, a.input_norm_codes),
                       maker(input_norm_part, norm_maker(m, a.input_norm, a.input_rstd, in, w.input_norm)));
        if (!is_next) rotate(m, a.qkv, cached);
    }
    if (parts & attention_part && is_next) {
        attend_next(m, layer, *cached->cache);
    } else if (parts & attention_part) {
        Heads h = split_heads(m, a.qkv);
        if (cached) h = cached_heads(m, layer, h, *cached);
        attention_forward(m.context, {.out = attention_heads(m, a.attention),
                                      .lse = a.lse,
                                      .q = h.q,
                                      .k = h.k,
                                      .v = h.v,
                                      .first = cached ? Tensor{} : m.first,
                                      .scale = attention_scale(m),
                                      .window = m.config.window_of(layer)});
    }
    if (parts & residual_mid_part)
        linear_forward(m, {layer, Layer::o, p.weight(w.o)}, a.residual_mid, a.attention,
                       wanted(attention_part, a.attention_codes), {}, in);
    if (parts & gate_up_part)
        linear_forward(
            m, {layer, Layer::gate_up, p.weight(w.gate_up)}, a.gate_up, a.post_norm,
            wanted(post_norm_part, a.post_norm_codes),
            maker(post_norm_part, norm_maker(m, a.post_norm, a.post_rstd, a.residual_mid, w.post_norm)));
    if (parts & residual_out_part)
        linear_forward(m, {layer, Layer::down, p.weight(w.down)}, a.residual_out, a.swiglu,
                       wanted(swiglu_part, a.swiglu_codes), maker(swiglu_part, swiglu_maker(m, a)),
                       a.residual_mid);
}

void show_block(const Model& m, int64_t layer) {
    if (!m.hook) return;
    const BlockActivations& a = m.activations.blocks[layer];
    for (const auto& row : block_activations(m.config, 1, 1, a.qkv.dtype))
        if (row.present && *row.name) show_row(m, "act.", layer, row, a.*row.member);
}
void show_gradient(const Model& m, int64_t layer, Tensor BlockActivations::* of, const Tensor& value) {
    if (!m.hook) return;
    for (const auto& row : block_activations(m.config, 1, 1, value.dtype))
        if (row.member == of) show_row(m, "dact.", layer, row, value);
}

// Embedding to final norm.
void forward_trunk(Model& m, bool trains, const CachedRows* cached = nullptr) {
    const Range range("forward");
    const Activations& a = m.activations;
    fork_exchanges(m);
    m.gathered = {};  // the weights may be others by now
    gather_weights(m, m.parameters.embedding.segment, m.parameters.embedding.segment + 1);
    embedding_forward(m.context, {.out = a.embedding,
                                  .tokens = reshape(a.tokens, {a.tokens.elements()}),
                                  .weight = m.parameters.weight(m.parameters.embedding)});
    show(m, "act", &Activations::embedding, a.embedding);
    for (int64_t layer = 0; layer < m.config.L; layer++) {
        const int64_t segment = m.parameters.blocks[layer].qkv.segment;
        gather_weights(m, segment, segment + 1);
        forward_block(m, layer, all_parts, trains ? all_parts & ~again_parts(m, layer) : 0, cached);
        show_block(m, layer);
    }
    gather_weights(m, m.parameters.final_norm.segment, -1);
    const Tensor weight = m.parameters.weight(m.parameters.final_norm);
    rmsnorm_forward(m.context, {.out = a.final_norm,
                                .rstd = a.final_rstd,
                                .x = residual_in(m, m.config.L),
                                .weight = weight,
                                .eps = m.config.eps});
    show(m, "act", &Activations::final_norm, a.final_norm);
}

// rows first .. first+count of a [N,X] tensor, or of a [N] one.
Tensor slice_rows(const Tensor& t, int64_t first, int64_t count) {
    Tensor s = t;
    s.data = static_cast<char*>(t.data) + first * t.stride[0] * size_of(t.dtype);
    s.shape[0] = count;
    return s;
}

// Calls it with the logits of `count` rows of the last pass from `first` on, a chunk at a time, and how many came before.
void for_logits(Model& m, int64_t first, int64_t count,
                const std::function<void(int64_t done, const Tensor& logits)>& use) {
    const int64_t chunk = m.activations.logits.shape[0];
    for (int64_t done = 0; done < count; done += chunk) {
        const Tensor rows = slice_rows(m.activations.logits, 0, std::min(chunk, count - done));
        linear_forward(m, {m.config.L, Layer::head, m.parameters.weight(m.parameters.head)}, rows,
                       slice_rows(m.activations.final_norm, first + done, rows.shape[0]), {});
        use(done, rows);
    }
}

struct HeadGradient {  // what the head computes on top of the losses; nothing where wanted is false
    bool wanted = false, accumulate = false;
    double dloss = 0;
};

// LM head and cross-entropy, a chunk of rows at a time, so that the logits never exist as a whole; with
// gradients, the logits' gradient takes the logits' place and is used before the next chunk.
void run_head(Model& m, const HeadGradient& gradient) {
    const Range range("head");
    const Activations& a = m.activations;
    const int64_t N = a.losses.shape[0];
    const LayerCall head{m.config.L, Layer::head, m.parameters.weight(m.parameters.head)};
    const Tensor all_targets = reshape(a.targets, {N});
    const int64_t chunk = a.logits.shape[0];
    for (int64_t first = 0; first < N; first += chunk) {
        const int64_t count = std::min(chunk, N - first);
        const Tensor x = slice_rows(a.final_norm, first, count), logits = slice_rows(a.logits, 0, count);
        const Tensor losses = slice_rows(a.losses, first, count),
                     chunk_targets = slice_rows(all_targets, first, count);
        const Tensor codes = gradient.wanted ? head_input_codes(m, count) : Tensor{};
        linear_forward(m, head, logits, x, codes);
        show(m, "logits", logits);
        const Tensor dlogits = gradient.wanted ? logits : Tensor{};
        cross_entropy(m.context, {.losses = losses,
                                  .dlogits = dlogits,
                                  .logits = logits,
                                  .targets = chunk_targets,
                                  .dloss = gradient.dloss,
                                  .ignore_index = int64_t{ignore_index}});
        if (!gradient.wanted) continue;
        show(m, "dact.logits", dlogits);
        linear_backward_input(m, head, slice_rows(a.dnorm, first, count), dlogits);
        linear_backward_weight(m, head, m.parameters.gradient(m.parameters.head), dlogits, x, codes, false,
                               {}, gradient.accumulate || first > 0);
    }
    show(m, "losses", a.losses);
}

// The norm of x in a block: dresidual takes up its share of dnorm. out: where the norm is written once more, or null.
void backward_norm(Model& m, const Placement& weight, const Tensor& out, const Tensor& x, const Tensor& rstd,
                   bool accumulate) {
    const Activations& d = m.activations;
    rmsnorm_backward(m.context, {.dx = d.dresidual,
                                 .dweight = m.parameters.gradient(weight),
                                 .out = out,
                                 .dout = d.dnorm,
                                 .x = x,
                                 .weight = m.parameters.weight(weight),
                                 .rstd = rstd,
                                 .dresidual = d.dresidual,
                                 .accumulate = accumulate});
}

// dresidual enters as the gradient of the block's output and leaves as that of its input. again: parts whose result was
// thrown away and whose backward, which reads what it was made of anyway, writes it once more.
void backward_feed_forward(Model& m, int64_t layer, unsigned again, bool accumulate) {
    const Parameters& p = m.parameters;
    const BlockParameters& w = p.blocks[layer];
    const BlockActivations& a = m.activations.blocks[layer];
    const Activations& d = m.activations;
    const LayerCall down{layer, Layer::down, p.weight(w.down)},
        gate_up{layer, Layer::gate_up, p.weight(w.gate_up)};
    const TensorMaker gradient = {[&] {
                                      swiglu_backward(m.context,
                                                      {.dgate_up = d.dgate_up,
                                                       .out = again & swiglu_part ? a.swiglu : Tensor{},
                                                       .dout = d.dswiglu,
                                                       .gate_up = a.gate_up});
                                      show_gradient(m, layer, &BlockActivations::gate_up, d.dgate_up);
                                  },
                                  [&](const Fp8Codes& to) {
                                      swiglu_backward_quantize(m.context, {.out = to.out,
                                                                           .transposed = to.transposed,
                                                                           .amax = to.amax,
                                                                           .saturated = to.saturated,
                                                                           .dout = d.dswiglu,
                                                                           .gate_up = a.gate_up,
                                                                           .scale = to.scale});
                                  }};
    const bool codes = makes_codes(m, layer);
    linear_backward_input(m, down, d.dswiglu, d.dresidual);
    show_gradient(m, layer, &BlockActivations::swiglu, d.dswiglu);
    if (!codes) gradient.values();  // writes swiglu again, too, which the next product reads
    linear_backward_weight(m, down, p.gradient(w.down), d.dresidual, a.swiglu, a.swiglu_codes,
                           again & swiglu_part, swiglu_maker(m, a), accumulate);
    linear_backward_input(m, gate_up, d.dnorm, d.dgate_up, codes ? gradient : TensorMaker{});
    show_gradient(m, layer, &BlockActivations::post_norm, d.dnorm);
    backward_norm(m, w.post_norm, again & post_norm_part ? a.post_norm : Tensor{}, a.residual_mid,
                  a.post_rstd, accumulate);
    linear_backward_weight(m, gate_up, p.gradient(w.gate_up), d.dgate_up, a.post_norm, a.post_norm_codes,
                           again & post_norm_part, {}, accumulate);
    show_gradient(m, layer, &BlockActivations::residual_mid, d.dresidual);
}

void backward_attention(Model& m, int64_t layer, unsigned again, bool accumulate) {
    const Parameters& p = m.parameters;
    const BlockParameters& w = p.blocks[layer];
    const BlockActivations& a = m.activations.blocks[layer];
    const Activations& d = m.activations;
    const LayerCall o{layer, Layer::o, p.weight(w.o)}, qkv{layer, Layer::qkv, p.weight(w.qkv)};
    linear_backward_input(m, o, d.dattention, d.dresidual);
    // The forward pass of the output product makes the attention's codes.
    const unsigned parts = again_parts(m, layer);
    linear_backward_weight(m, o, p.gradient(w.o), d.dresidual, a.attention, a.attention_codes,
                           (parts & attention_part) && !(parts & residual_mid_part), {}, accumulate);
    show_gradient(m, layer, &BlockActivations::attention, d.dattention);
    const Heads h = split_heads(m, a.qkv), dh = split_heads(m, d.dqkv);
    attention_backward(m.context, {.dq = dh.q,
                                   .dk = dh.k,
                                   .dv = dh.v,
                                   .dout = attention_heads(m, d.dattention),
                                   .out = attention_heads(m, a.attention),
                                   .lse = a.lse,
                                   .q = h.q,
                                   .k = h.k,
                                   .v = h.v,
                                   .first = m.first,
                                   .scale = attention_scale(m),
                                   .window = m.config.window_of(layer)});
    show_gradient(m, layer, &BlockActivations::qkv, d.dqkv);
    const TensorMaker turned_back = {
        [&] {
            for (const HeadRange& range : rotated_ranges(m.config)) {
                const Tensor dx = heads(m, d.dqkv, range.first, range.count);
                rope_backward(m.context, {.dx = dx, .dout = dx, .cis = d.cis, .interleaved = false});
            }
            if (m.fp8) show(m, "dact." + std::to_string(layer) + ".qkv", d.dqkv);  // as it is quantised
        },
        [&](const Fp8Codes& to) {
            const int64_t N = d.dqkv.shape[0], HD = m.config.HD, heads = d.dqkv.shape[1] / HD;
            const HeadRange last = rotated_ranges(m.config).back();
            rope_backward_quantize(m.context, {.out = reshape(to.out, {N, heads, HD}),
                                               .transposed = reshape(to.transposed, {heads, HD, N}),
                                               .amax = to.amax,
                                               .saturated = to.saturated,
                                               .dout = reshape(d.dqkv, {N, heads, HD}),
                                               .cis = d.cis,
                                               .scale = to.scale,
                                               .rotated = last.first + last.count});
        }};
    linear_backward_input(m, qkv, d.dnorm, d.dqkv, turned_back);
    show_gradient(m, layer, &BlockActivations::input_norm, d.dnorm);
    backward_norm(m, w.input_norm, again & input_norm_part ? a.input_norm : Tensor{}, residual_in(m, layer),
                  a.input_rstd, accumulate);
    linear_backward_weight(m, qkv, p.gradient(w.qkv), d.dqkv, a.input_norm, a.input_norm_codes,
                           again & input_norm_part, {}, accumulate);
}

// Of the parts to compute again, those that no other needs: their own backward writes their result, which only the
// gradient of the next product's weight reads.
unsigned written_again(unsigned again) {
    unsigned written = again & swiglu_part;
    if (!(again & qkv_part)) written |= again & input_norm_part;
    if (!(again & gate_up_part)) written |= again & post_norm_part;
    return written;
}

// From the final norm's gradient, in dnorm, down to the embedding.
void backward_trunk(Model& m, const Pass& pass) {
    const Range range("backward");
    const Activations& a = m.activations;
    const Parameters& p = m.parameters;
    const bool accumulate = kernels_add(m, pass);
    show(m, "dact", &Activations::final_norm, a.dnorm);
    rmsnorm_backward(m.context, {.dx = a.dresidual,
                                 .dweight = p.gradient(p.final_norm),
                                 .dout = a.dnorm,
                                 .x = residual_in(m, m.config.L),
                                 .weight = p.weight(p.final_norm),
                                 .rstd = a.final_rstd,
                                 .accumulate = accumulate});
    reduce_gradients(m, p.final_norm.segment, pass);
    for (int64_t layer = m.config.L - 1; layer >= 0; layer--) {
        show_gradient(m, layer, &BlockActivations::residual_out, a.dresidual);
        const unsigned again = again_parts(m, layer), written = written_again(again);
        const int64_t segment = p.blocks[layer].qkv.segment;
        gather_weights(m, segment, layer > 0 ? segment - 1 : -1);
        pause_fp8(m, true);
        forward_block(m, layer, again & ~written, all_parts);
        pause_fp8(m, false);
        begin_gradients(m, segment);
        backward_feed_forward(m, layer, written, accumulate);
        backward_attention(m, layer, written, accumulate);
        reduce_gradients(m, segment, pass);
    }
    show(m, "dact", &Activations::embedding, a.dresidual);
    begin_gradients(m, p.embedding.segment);
    embedding_backward(m.context,
                       {.dweight = p.gradient(p.embedding),
                        .dout = a.dresidual,
                        .tokens = reshape(a.tokens, {a.tokens.elements()}),
                        .accumulate = accumulate || m.config.tied});  // tied: the head has written its share
    reduce_gradients(m, p.embedding.segment, pass);
}

// `count` ranks, `distance` apart; null where there is one group, or no ranks.
std::unique_ptr<Communicator> every(Communicator* ranks, const Sharding& s, int64_t first, int64_t distance,
                                    int64_t count) {
    if (!ranks || s.groups() == 1) return nullptr;
    std::vector<int64_t> members;
    for (int64_t i = 0; i < count; i++) members.push_back(first + i * distance);
    return ranks->split(members);
}

void make_cis(const Model& m) {
    for (const Tensor& cis : {m.activations.cis, m.cache ? m.cache->cis : Tensor{}})
        if (cis.data)
            precompute_cis(m.context, {.cis = cis,
                                       .frequency = m.frequency,
                                       .attention_factor = m.config.rope_scaling.attention_factor});
}

}  // namespace

Model::Model(const Config& config_, const ModelOptions& options_, Communicator* ranks_)
    : config(config_),
      options(options_),
      ranks(ranks_),
      group(every(ranks, options.sharding, options.sharding.rank - options.sharding.place(), 1,
                  options.sharding.group)),
      replicas(every(ranks, options.sharding, options.sharding.place(), options.sharding.group,
                     options.sharding.groups())),
      kernels(options_.kernels),
      context(computing_context()) {
    if (ranks) exchanges.emplace();
    context.stream = stream.handle;
    context.workspace = &workspace;
    context.kernels = &kernels;
    context.gemms = &gemms;
    plan_parameters(parameters, config, options.precision, options.sharding, options.training, arena);
    if (options.fp8)
        plan_fp8(fp8.emplace(), *options.fp8, config, options.sharding, options.batch_size * options.seq_len,
                 arena);
    plan_activations(activations, config, options.batch_size, options.seq_len, options.precision.weights,
                     options.recompute, fp8 ? fp8->blocks : Fp8Blocks{}, options.logits_bytes,
                     fp8 && fp8->options.head ? fp8_multiple : 1, options.document_mask, options.training,
                     arena);
    if (fp8) plan_fp8_head(*fp8, config, activations.logits.shape[0], arena);
    if (options.cache.positions > 0)
        plan_cache(cache.emplace(), config, options.cache, options.precision.weights, arena);
    arena.plan("scalars", &frequency, shaped(DType::f64, {config.HD / 2}));
    arena.plan("scalars", &squares, shaped(DType::f64, {1}));
    arena.plan("scalars", &lr, shaped(DType::f32, {1}));
    arena.plan("scalars", &step, shaped(DType::i32, {1}));
    if (options.skip_nonfinite) arena.plan("scalars", &loss_squares, shaped(DType::f64, {1}));

    // A step that only asks its operations what they work in, on addresses that nobody reads.
    arena.place(reinterpret_cast<void*>(uintptr_t{1} << 20));
    reshape_activations(activations, config, options.batch_size, options.seq_len);
    context.dry_run = true;
    const Range range("dry run");
    make_cis(*this);
    forward(*this);
    first = activations.first;  // samples are computed without
    if (cache) try_cache(*this);
    for (const bool measured : {false, true}) {
        if (!options.training) break;
        if (fp8) fp8->measured.assign(static_cast<size_t>(fp8->slots), measured);
        forward_backward(*this, true, 1);
        forward_backward(*this, false, 1);
    }
    if (options.training) llamac::optimizer_step(*this, {}, 0);
    if (fp8) fp8->measured.assign(static_cast<size_t>(fp8->slots), false);
    context.dry_run = false;
    if (workspace.asked)
        arena.plan("work space of operations", &workspace_bytes,
                   shaped(DType::i32, {(workspace.asked + 3) / 4}));
}

void Model::allocate() {
    arena.allocate();
    if (workspace_bytes.data) workspace.use(workspace_bytes.data, workspace_bytes.bytes());
    if (fp8) reset_fp8(*fp8, config);
    copy_bytes(frequency.data, rope_frequencies(config).data(), frequency.bytes());
    make_cis(*this);
}

void set_batch(Model& m, const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T,
               const int32_t* first) {
    CHECK(B * T <= m.options.batch_size * m.options.seq_len && T <= m.options.seq_len);
    CHECK(!first || m.options.document_mask);
    const Activations& a = m.activations;
    reshape_activations(m.activations, m.config, B, T);
    copy_bytes_async(m.context, a.tokens.data, tokens, a.tokens.bytes());
    copy_bytes_async(m.context, a.targets.data, targets, a.targets.bytes());
    m.first = first ? a.first : Tensor{};
    if (first) copy_bytes_async(m.context, a.first.data, first, a.first.bytes());
}

void forward(Model& m) {
    begin_fp8_pass(m, false, true);
    forward_trunk(m, false);
    run_head(m, {});
}

void forward_backward(Model& m, bool first, double scale, bool last) {
    const Pass pass{first, last};
    begin_fp8_pass(m, true, first);
    forward_trunk(m, true);
    run_head(m, {true, kernels_add(m, pass), scale / static_cast<double>(m.activations.losses.shape[0])});
    if (m.options.skip_nonfinite)
        global_norm(m.context, {.squares = m.loss_squares, .x = m.activations.losses, .accumulate = !first});
    if (m.options.skip_nonfinite && last) sum_over_ranks(m, m.loss_squares);
    backward_trunk(m, pass);
    join_exchanges(m);
}

double mean(const float* losses, int64_t count) {
    return std::accumulate(losses, losses + count, 0.0) / static_cast<double>(count);
}

double mean_loss(const Model& m) {
    const Tensor& losses = m.activations.losses;
    std::vector<float> values(static_cast<size_t>(losses.elements()));
    copy_bytes(values.data(), losses.data, losses.bytes());
    return mean(values.data(), losses.elements());
}

void forward_cached(Model& m, const CachedRows& rows) {
    forward_trunk(m, false, &rows);
}

void logits_of_rows(Model& m, int64_t first, int64_t count, std::vector<float>& logits) {
    // A planned batch may be larger than the host's memory.
    if (!m.context.dry_run) logits.resize(static_cast<size_t>(count * m.config.V));
    for_logits(m, first, count, [&](int64_t done, const Tensor& rows) {
        if (!m.context.dry_run) copy_as(DType::f32, logits.data() + done * m.config.V, rows);
    });
}

void likeliest_of_rows(Model& m, const Tensor& likeliest) {
    const Tensor all = reshape(likeliest, {likeliest.elements()});
    for_logits(m, 0, all.shape[0], [&](int64_t done, const Tensor& rows) {
        argmax(m.context, {.out = slice_rows(all, done, rows.shape[0]), .x = rows});
    });
}

void next_logits(Model& m, const int32_t* tokens, int64_t T, std::vector<float>& logits) {
    set_batch(m, tokens, tokens, 1, T);  // no losses are made: targets are not read
    begin_fp8_pass(m, false, true);
    forward_trunk(m, false);
    logits_of_rows(m, T - 1, 1, logits);
}

}  // namespace llamac
