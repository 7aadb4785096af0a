#include "model/model.h"

#include <numeric>

#include "model/block.h"
#include "model/exchange.h"
#include "model/linear.h"
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
        forward_block(m, layer, trains ? Run::training : Run::inference, cached);
        show_block(m, layer);
    }
    gather_weights(m, m.parameters.final_norm.segment, -1);
    const Tensor weight = m.parameters.weight(m.parameters.final_norm);
    rmsnorm_forward(m.context, {.out = a.final_norm,
                                .rstd = a.final_rstd,
                                .x = block_input(m, m.config.L),
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
    const Linear head{m.config.L};
    for (int64_t done = 0; done < count; done += chunk) {
        const Tensor rows = slice_rows(m.activations.logits, 0, std::min(chunk, count - done));
        const Quantizable x =
            linear_input(m, head, slice_rows(m.activations.final_norm, first + done, rows.shape[0]), {});
        quantize(m, x, false);
        linear_forward(m, rows, x, linear_weight(m, head));
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
    const Linear head{m.config.L};
    const Quantizable weight = linear_weight(m, head);
    const Tensor all_targets = reshape(a.targets, {N});
    const int64_t chunk = a.logits.shape[0];
    for (int64_t first = 0; first < N; first += chunk) {
        const int64_t count = std::min(chunk, N - first);
        const Quantizable x = linear_input(m, head, slice_rows(a.final_norm, first, count),
                                           gradient.wanted ? head_input_codes(m, count) : Tensor{});
        const Tensor logits = slice_rows(a.logits, 0, count);
        const Tensor losses = slice_rows(a.losses, first, count),
                     chunk_targets = slice_rows(all_targets, first, count);
        quantize(m, x, false);
        linear_forward(m, logits, x, weight);
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
        const Quantizable dout = output_gradient(m, head, dlogits);
        quantize(m, dout, false);
        linear_backward_input(m, slice_rows(a.dnorm, first, count), dout, weight);
        linear_backward_weight(m, m.parameters.gradient(m.parameters.head), dout, x,
                               gradient.accumulate || first > 0);
    }
    show(m, "losses", a.losses);
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
                                 .x = block_input(m, m.config.L),
                                 .weight = p.weight(p.final_norm),
                                 .rstd = a.final_rstd,
                                 .accumulate = accumulate});
    reduce_gradients(m, p.final_norm.segment, pass);
    for (int64_t layer = m.config.L - 1; layer >= 0; layer--) {
        show_gradient(m, layer, &BlockActivations::residual_out, a.dresidual);
        const int64_t segment = p.blocks[layer].qkv.segment;
        gather_weights(m, segment, layer > 0 ? segment - 1 : -1);
        pause_fp8(m, true);
        forward_block(m, layer, Run::recomputation);
        pause_fp8(m, false);
        begin_gradients(m, segment);
        backward_block(m, layer, accumulate);
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
        plan_fp8(fp8.emplace(), *options.fp8, config, parameters, options.batch_size * options.seq_len,
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
