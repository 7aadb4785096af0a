#include "model/model.h"

#include <numeric>

#include "core/device_memory.h"
#include "model/block.h"
#include "model/context_parallel.h"
#include "model/linear.h"
#include "model/optimizer.h"
#include "model/pipeline.h"
#include "model/tensor_parallel.h"
#include "model/zero.h"
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

Norm final_norm(const Model& m) {
    const Activations& a = m.activations;
    const Parameters& p = m.parameters;
    return {block_input(m, m.config.L), a.final_rstd, a.final_mean, p.final_norm, p.final_norm_bias};
}

// [B,T] as [N].
Tensor flat(const Tensor& t) {
    return reshape(t, {t.elements()});
}

// The tokens' positions, each in its document or sequence.
void find_positions(const Model& m, const CachedRows* cached) {
    const Activations& a = m.activations;
    if (!cached && has_pieces(m)) return find_positions_of_pieces(m);
    if (!cached) return token_positions(m.context, {.out = a.positions, .first = a.mask, .offset = 0});
    if (!cached->is_decode)
        return token_positions(m.context, {.out = a.positions, .offset = cached->position - cached->begin});
    Tensor begin = cached->cache->first;
    begin.shape[0] = a.positions.shape[0];
    token_positions(m.context, {.out = a.positions, .begin = begin, .end = cached->cache->last, .offset = 0});
}

// The vector of the tokens' type.
Tensor type_0(const Tensor& types) {
    return make_tensor(types.data, types.dtype, {types.shape[1]});
}
void type_backward(Model& m, bool accumulate) {
    const Tensor dtypes = m.parameters.gradient(m.parameters.types), dtype_0 = type_0(dtypes);
    bias_backward(m.context, {.dbias = dtype_0, .dout = m.activations.dresidual, .accumulate = accumulate});
    if (!accumulate && !m.context.dry_run)
        CHECK(hipMemsetAsync(static_cast<char*>(dtypes.data) + dtype_0.bytes(), 0,
                             static_cast<size_t>(dtypes.bytes() - dtype_0.bytes()), m.context.stream));
}

Norm transform_norm(const Model& m) {
    const Activations& a = m.activations;
    const Parameters& p = m.parameters;
    return {a.transform_gelu, a.transform_rstd, a.transform_mean, p.transform_norm, p.transform_norm_bias};
}
// An encoder's head computes a linear, the activation and a norm before the logits.
void transform_forward(Model& m) {
    const Activations& a = m.activations;
    const Parameters& p = m.parameters;
    linear_forward(m, a.transform, {a.final_norm}, {p.weight(p.transform)}, {}, p.weight(p.transform_bias));
    gelu_forward(m.context, {.out = a.transform_gelu, .x = a.transform, .tanh = has_tanh(m)});
    norm_forward(m, a.transform_norm, transform_norm(m));
    show(m, "act", &Activations::transform, a.transform);
    show(m, "act", &Activations::transform_gelu, a.transform_gelu);
    show(m, "act", &Activations::transform_norm, a.transform_norm);
}
// dnorm, the gradient of its result, becomes that of the final norm.
void transform_backward(Model& m, bool accumulate) {
    const Activations& a = m.activations;
    const Parameters& p = m.parameters;
    const Tensor& dtransform = a.dattention;
    show(m, "dact", &Activations::transform_norm, a.dnorm);
    norm_backward(m, a.dresidual, transform_norm(m), a.dnorm, false, {}, accumulate);
    show(m, "dact", &Activations::transform_gelu, a.dresidual);
    gelu_backward(m.context, {.dx = dtransform, .dout = a.dresidual, .x = a.transform, .tanh = has_tanh(m)});
    show(m, "dact", &Activations::transform, dtransform);
    if (p.transform_bias.trains)
        bias_backward(m.context,
                      {.dbias = p.gradient(p.transform_bias), .dout = dtransform, .accumulate = accumulate});
    if (p.transform.trains)
        linear_backward_weight(m, p.gradient(p.transform), {dtransform}, {a.final_norm}, accumulate);
    linear_backward_input(m, a.dnorm, {dtransform}, {p.weight(p.transform)});
}

// Embedding to final norm, as far as they are in a chunk that the model holds.
void forward_trunk(Model& m, bool trains, int64_t chunk, const CachedRows* cached = nullptr) {
    const Parameters& p = m.parameters;
    const Range range("forward");
    const Activations& a = m.activations;
    fork_exchanges(m);  // the weights may be others by now
    const LayerRange& layers = p.layers[chunk];
    const bool to_head = layers.end == m.config.L;
    if (layers.first == 0) {
        gather_weights(m, 0, 1);
        const bool learned = m.config.positions == PositionKind::learned;
        if (learned) find_positions(m, cached);
        const bool adds = learned && m.options.tensor.rank == 0;  // a term of one of the ranks
        const Tensor terms = terms_of(m, a.embedding);
        embedding_forward(m.context, {.out = terms,
                                      .tokens = tokens_of_rank(m),
                                      .weight = p.weight(p.embedding),
                                      .positions = adds ? p.weight(p.positions) : Tensor{},
                                      .place = adds ? flat(a.positions) : Tensor{}});
        reduce_rows(m, a.embedding, terms);
        if (m.config.token_types)
            bias_forward(m.context,
                         {.out = a.embedding, .x = a.embedding, .bias = type_0(p.weight(p.types))});
        show(m, "act", &Activations::embedding, a.embedding);
    }
    for (int64_t layer = layers.first; layer < layers.end; layer++) {
        const int64_t segment = p.segment_of(layer);
        gather_weights(m, segment, to_head || layer + 1 < layers.end ? segment + 1 : -1);
        forward_block(m, layer, trains ? Run::training : Run::inference, cached);
        show_block(m, layer);
    }
    if (!to_head) return;
    gather_weights(m, p.segment_of(m.config.L), -1);
    norm_forward(m, own_rows(m, a.final_norm), final_norm(m));
    gather_rows(m, a.final_norm);
    show(m, "act", &Activations::final_norm, a.final_norm);
    if (m.config.post_norm) transform_forward(m);
}
// The input of the product that makes logits.
const Tensor& head_input(const Model& m) {
    return m.config.post_norm ? m.activations.transform_norm : m.activations.final_norm;
}

// rows first .. first+count of a [N,X] tensor, or of a [N] one.
Tensor slice_rows(const Tensor& t, int64_t first, int64_t count) {
    Tensor s = t;
    s.data = static_cast<char*>(t.data) + first * t.stride[0] * size_of(t.dtype);
    s.shape[0] = count;
    return s;
}

// Logits, or their gradients, without the padding of the vocabulary. The padding is 0, as the head's rows there are.
Tensor of_vocabulary(const Model& m, Tensor logits) {
    logits.shape[1] = m.config.V;
    return logits;
}

// Calls it with chunks of the logits of rows first .. first+count of the last pass, and the number of rows before the chunk.
void for_logits(Model& m, int64_t first, int64_t count,
                const std::function<void(int64_t done, const Tensor& logits)>& use) {
    const int64_t chunk = m.activations.logits.shape[0];
    const Linear head{m.config.L};
    for (int64_t done = 0; done < count; done += chunk) {
        const Tensor rows = slice_rows(m.activations.logits, 0, std::min(chunk, count - done));
        const Quantizable x =
            linear_input(m, head, slice_rows(head_input(m), first + done, rows.shape[0]), {});
        quantize(m, x, false);
        linear_forward(m, rows, x, linear_weight(m, head));
        use(done, of_vocabulary(m, rows));
    }
}

// What the head reads and writes: of all rows, or of those that are predicted alone, which it gathers.
struct HeadRows {
    Tensor x, targets, losses, dx;
};
HeadRows head_rows(Model& m) {
    const Activations& a = m.activations;
    if (!a.predicted.data) return {head_input(m), targets_of_rank(m), a.losses, a.dnorm};
    const int64_t M = a.predicted_losses.shape[0];
    embedding_forward(
        m.context,
        {.out = a.predicted_input, .tokens = slice_rows(a.predicted, 0, M), .weight = head_input(m)});
    return {a.predicted_input, slice_rows(a.predicted, M, M), a.predicted_losses,
            slice_rows(a.dresidual, 0, M)};
}
// Rows that are not predicted take the last one, which is padding: its loss and its gradient are 0.
void scatter_rows(Model& m, const HeadRows& rows, bool gradient) {
    const Activations& a = m.activations;
    if (!a.predicted.data) return;
    const int64_t M = rows.losses.shape[0], N = a.losses.shape[0];
    const Tensor place = slice_rows(a.predicted, 2 * M, N);
    embedding_forward(
        m.context,
        {.out = reshape(a.losses, {N, 1}), .tokens = place, .weight = reshape(rows.losses, {M, 1})});
    if (gradient) embedding_forward(m.context, {.out = a.dnorm, .tokens = place, .weight = rows.dx});
}

struct HeadGradient {  // wanted: the head also computes the gradients
    bool wanted = false, accumulate = false;
};

// LM head and cross-entropy, a chunk of rows at a time, so that the logits never exist as a whole; with
// gradients, the logits' gradient takes the logits' place and is used before the next chunk.
void run_head(Model& m, const HeadGradient& gradient) {
    const Range range("head");
    const Activations& a = m.activations;
    const HeadRows rows = head_rows(m);
    const int64_t N = rows.losses.shape[0];
    const Linear head{m.config.L};
    const Quantizable weight = linear_weight(m, head);
    const FlatParam& bias = m.parameters.head_bias;
    const Tensor& dloss = m.loss_scale.data ? m.scaled_dloss : m.dloss;
    if (gradient.wanted && m.loss_scale.data)
        scale_loss(m.context, {.out = dloss, .dloss = m.dloss, .scale = m.loss_scale});
    Tensor dlosses = make_tensor(dloss.data, dloss.dtype, {N});
    dlosses.stride[0] = 0;
    const int64_t chunk = a.logits.shape[0];
    for (int64_t first = 0; first < N; first += chunk) {
        const int64_t count = std::min(chunk, N - first);
        const Quantizable x = linear_input(m, head, slice_rows(rows.x, first, count),
                                           gradient.wanted ? head_input_codes(m, count) : Tensor{});
        const Tensor logits = slice_rows(a.logits, 0, count);
        const Tensor losses = slice_rows(rows.losses, first, count),
                     chunk_targets = slice_rows(rows.targets, first, count);
        quantize(m, x, false);
        linear_forward(m, logits, x, weight, {}, bias.shape.empty() ? Tensor{} : m.parameters.weight(bias));
        const Tensor own = of_vocabulary(m, logits), dlogits = gradient.wanted ? own : Tensor{};
        show(m, "logits", own);
        compute_losses(m, losses, dlogits, own, chunk_targets, slice_rows(dlosses, 0, count));
        if (!gradient.wanted) continue;
        show(m, "dact.logits", dlogits);
        const bool accumulate = gradient.accumulate || first > 0;
        if (!bias.shape.empty() && bias.trains)
            bias_backward(m.context,
                          {.dbias = m.parameters.gradient(bias), .dout = logits, .accumulate = accumulate});
        const Quantizable dout = output_gradient(m, head, logits);
        quantize(m, dout, false);
        linear_backward_input(m, slice_rows(rows.dx, first, count), dout, weight);
        if (m.parameters.head.trains)
            linear_backward_weight(m, m.parameters.gradient(m.parameters.head), dout, x, accumulate);
    }
    scatter_rows(m, rows, gradient.wanted);
    if (gradient.wanted) reduce_rows(m, own_rows(m, a.dnorm), a.dnorm);
    show(m, "losses", a.losses);
}

// From the gradient of the final norm, in dnorm, or of the last block's output, in dresidual, down to the first block's input
// and the embedding, as far as they are in a chunk.
void backward_trunk(Model& m, const MicroBatch& micro_batch, int64_t chunk) {
    const Range range("backward");
    const Activations& a = m.activations;
    const Parameters& p = m.parameters;
    const bool accumulate = accumulates_in_place(m, micro_batch);
    const LayerRange& layers = p.layers[chunk];
    if (layers.end == m.config.L) {
        if (m.config.post_norm) transform_backward(m, accumulate);
        show(m, "dact", &Activations::final_norm, a.dnorm);
        norm_backward(m, a.dresidual, final_norm(m), own_rows(m, a.dnorm), false, {}, accumulate);
        reduce_gradients(m, p.segment_of(m.config.L), micro_batch);
    }
    for (int64_t layer = layers.end - 1; layer >= layers.first; layer--) {
        if (!p.trains_before(p.segment_of(layer) + 1)) return;
        show_gradient(m, layer, &BlockActivations::residual_out, a.dresidual);
        const int64_t segment = p.segment_of(layer);
        gather_weights(m, segment, layer > layers.first ? segment - 1 : -1);
        pause_fp8(m, true);
        forward_block(m, layer, Run::recomputation);
        pause_fp8(m, false);
        begin_gradients(m, segment);
        backward_block(m, layer, accumulate);
        reduce_gradients(m, segment, micro_batch);
    }
    if (layers.first > 0) return;
    const bool trains_positions = m.config.positions == PositionKind::learned && p.positions.trains,
               trains_types = m.config.token_types && p.types.trains;
    if (!p.embedding.trains && !trains_positions && !trains_types) return;
    gather_rows(m, a.dresidual);
    show(m, "dact", &Activations::embedding, a.dresidual);
    begin_gradients(m, 0);
    if (trains_types) type_backward(m, accumulate);
    if (trains_positions)
        embedding_backward(m.context, {.dweight = p.gradient(p.positions),
                                       .dout = a.dresidual,
                                       .tokens = flat(a.positions),
                                       .accumulate = accumulate});
    if (p.embedding.trains) {
        const Tensor dweight = p.gradient(p.embedding);
        embedding_backward(m.context, {.dweight = dweight,
                                       .dout = a.dresidual,
                                       .tokens = tokens_of_rank(m),
                                       // Tied: the head has written its share, if it is here.
                                       .accumulate = accumulate || (p.is_tied && p.holds_head())});
        clear_zero_row(m, dweight);
    }
    reduce_gradients(m, 0, micro_batch);
}

// The backward pass, behind a forward pass whose exchanges are open. Its own stay open.
void backward_half(Model& m, const MicroBatch& micro_batch, int64_t chunk) {
    if (m.parameters.layers[chunk].end == m.config.L) {
        begin_fp8_pass(m, true, micro_batch.first);  // the head's weight has codes of its own
        run_head(m, {true, accumulates_in_place(m, micro_batch)});
        if (m.loss_squares.data)
            global_norm(
                m.context,
                {.squares = m.loss_squares, .x = m.activations.losses, .accumulate = !micro_batch.first});
        if (m.loss_squares.data && micro_batch.last) sum_over_ranks(m, m.loss_squares);
    }
    backward_trunk(m, micro_batch, chunk);
}

// The forward pass of this stage, without gradients.
void forward_stage(Model& m, const CachedRows* cached = nullptr) {
    for (int64_t chunk = 0; chunk < std::ssize(m.parameters.layers); chunk++) {
        receive_input(m, chunk);
        forward_trunk(m, false, chunk, cached);
        send_output(m, chunk);
    }
}

void copy_logits(Model& m, int64_t first, int64_t count, std::vector<float>& logits) {
    for_logits(m, first, count, [&](int64_t done, const Tensor& rows) {
        if (m.context.dry_run) return;
        if (m.tensor) return gather_logits(m, rows, logits.data() + done * m.whole.V);
        float* const to = logits.data() + done * m.config.V;
        if (rows.contiguous()) return copy_as(DType::f32, to, rows);
        for (int64_t row = 0; row < rows.shape[0]; row++)
            copy_as(DType::f32, to + row * m.config.V,
                    make_tensor(slice_rows(rows, row, 1).data, rows.dtype, {m.config.V}));
    });
}

// `count` of the ranks, `distance` apart; null where that is not wanted, or there are no ranks.
std::unique_ptr<Communicator> every(Communicator* ranks, bool wanted, int64_t first, int64_t distance,
                                    int64_t count) {
    if (!ranks || !wanted) return nullptr;
    std::vector<int64_t> members;
    for (int64_t i = 0; i < count; i++) members.push_back(first + i * distance);
    return ranks->split(members);
}

int64_t ranks_per_stage(const ModelOptions& o) {
    return o.sharding.ranks * o.tensor.ranks;
}
int64_t rank_in_stage(const ModelOptions& o) {
    return o.sharding.rank * o.tensor.ranks + o.tensor.rank;
}
// Null if the pipeline has no other stages. Those have a communicator that nothing uses.
std::unique_ptr<Communicator> ends_of(Communicator* pipeline) {
    if (!pipeline || pipeline->size == 2) return nullptr;
    const int64_t last = pipeline->size - 1;
    const bool between = pipeline->rank > 0 && pipeline->rank < last;
    return between ? every(pipeline, true, 1, 1, last - 1) : every(pipeline, true, 0, last, 2);
}

void make_cis(Model& m) {
    if (has_pieces(m)) make_cis_of_pieces(m);
    for (const Tensor& cis :
         {has_pieces(m) ? Tensor{} : m.activations.cis, m.cache ? m.cache->cis : Tensor{}})
        if (cis.data)
            precompute_cis(m.context, {.cis = cis,
                                       .frequency = m.frequency,
                                       .attention_factor = m.config.rope_scaling.attention_factor});
}

}  // namespace

Model::Model(const Config& config_, const ModelOptions& options_, Communicator* all)
    : whole(config_),
      config(divide(whole, options_.tensor)),
      options(with_stage(whole, options_)),
      pipeline(every(all, options.pipeline.ranks > 1, rank_in_stage(options), ranks_per_stage(options),
                     options.pipeline.ranks)),
      first_and_last(ends_of(pipeline.get())),
      stage(every(all, options.pipeline.ranks > 1 && ranks_per_stage(options) > 1,
                  options.pipeline.rank * ranks_per_stage(options), 1, ranks_per_stage(options))),
      ends(first_and_last ? first_and_last.get() : pipeline.get()),
      world(pipeline ? stage.get() : all),
      tensor(every(world, options.tensor.ranks > 1, options.sharding.rank * options.tensor.ranks, 1,
                   options.tensor.ranks)),
      context_ranks(
          every(world, options.context.ranks > 1,
                (options.sharding.rank - options.context.rank) * options.tensor.ranks + options.tensor.rank,
                options.tensor.ranks, options.context.ranks)),
      data(every(world, options.tensor.ranks > 1 && options.sharding.ranks > 1, options.tensor.rank,
                 options.tensor.ranks, options.sharding.ranks)),
      ranks(data                          ? data.get()
            : options.sharding.ranks == 1 ? nullptr
                                          : world),
      group(every(ranks, options.sharding.groups() > 1, options.sharding.rank - options.sharding.place(), 1,
                  options.sharding.group)),
      replicas(every(ranks, options.sharding.groups() > 1, options.sharding.place(), options.sharding.group,
                     options.sharding.groups())),
      kernels(options_.kernels),
      context(computing_context()) {
    context.stream = stream.handle;
    context.workspace = &workspace;
    context.kernels = &kernels;
    context.gemms = &gemms;
    const std::vector<LayerRange> layers =
        options.layers.empty() ? std::vector{LayerRange{0, config.L}} : options.layers;
    for (const LayerRange& chunk : layers)
        CHECK(chunk.first >= 0 && chunk.first < chunk.end && chunk.end <= config.L);
    check_lora(config, options.lora);
    check_context_parallel(config, options);
    plan_parameters(parameters, config, whole.V, options.precision, options.sharding, options.tensor, layers,
                    options.frozen, options.frozen_codes, options.lora, options.training, arena);
    if (ranks) exchanges.emplace(parameters.segments.size());
    if (options.lora.rank > 0) plan_lora(lora.emplace(), config, parameters, options, arena);
    if (options.fp8)
        plan_fp8(fp8.emplace(), *options.fp8, config, parameters, options.rows(), options.micro_batches,
                 arena);
    waiting.resize(static_cast<size_t>(options.micro_batches));  // that of `activations` stays empty
    std::vector<Activations*> in_flight = {&activations};
    for (size_t k = 1; k < waiting.size(); k++) in_flight.push_back(&waiting[k]);
    plan_activations(in_flight, config, options, layers, fp8 ? fp8->blocks : Fp8Blocks{}, arena);
    if (fp8) plan_fp8_head(*fp8, config, activations.logits.shape[0], arena);
    if (options.cache.positions > 0)
        plan_cache(cache.emplace(), config, parameters, options.cache, options.precision.weights, arena);
    plan_tensor_parallel(*this);
    plan_context_parallel(*this);
    if (options.pipeline.ranks > 1) arena.plan("logits", &shared_logits, shaped(DType::f32, {whole.V}));
    if (layers.size() > 1 && options.training)
        arena.plan("activation gradients", &outgoing, activations.embedding);
    arena.plan("scalars", &frequency, shaped(DType::f64, {config.rotary_size() / 2}));
    arena.plan("scalars", &dloss, shaped(DType::f32, {1}));
    arena.plan("scalars", &squares, shaped(DType::f64, {1}));
    arena.plan("scalars", &lr, shaped(DType::f32, {1}));
    arena.plan("scalars", &step, shaped(DType::i32, {1}));
    const bool scaled = options.training && options.precision.weights == DType::fp16;
    if (options.skip_nonfinite || scaled) arena.plan("scalars", &loss_squares, shaped(DType::f64, {1}));
    if (scaled) {
        arena.plan("scalars", &loss_scale, shaped(DType::f32, {1}));
        arena.plan("scalars", &scaled_dloss, shaped(DType::f32, {1}));
        arena.plan("scalars", &loss_scale_counts, shaped(DType::i32, {1, 2}));
    }

    // A dry run of a step: operations report their workspaces. The addresses are dummies.
    arena.place(reinterpret_cast<void*>(uintptr_t{1} << 20));
    reshape_activations(activations, config, options.batch_size, options.own_len());
    context.dry_run = true;
    const Range range("dry run");
    make_cis(*this);
    forward(*this);
    activations.mask = activations.first;  // samples are computed without
    activations.mask_end = activations.end;
    if (cache) try_cache(*this);
    for (const bool measured : {false, true}) {
        if (!options.training || (measured && !fp8)) break;
        if (fp8) fp8->measured.assign(static_cast<size_t>(fp8->slots), measured);
        forward_backward(*this, true);
        forward_backward(*this, false);
    }
    if (options.predicted_rows) {
        activations.predicted = activations.predicted_ids;
        for (const bool first : {true, false}) forward_backward(*this, first);
        activations.predicted = {};
    }
    if (options.training) llamac::optimizer_step(*this, {}, 0);
    if (lora) hash_base(*this);
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
    if (lora) reset_lora(*lora);
    const int64_t longest =
        options.training ? options.seq_len : std::max(options.seq_len, options.cache.positions);
    copy_bytes(frequency.data, rope_frequencies(config, longest).data(), frequency.bytes());
    if (cache && cache->own_cis.data) set_unturned(*cache);
    const float of_mean = static_cast<float>(1.0 / static_cast<double>(options.batch_size * options.seq_len));
    copy_bytes(dloss.data, &of_mean, sizeof of_mean);
    if (loss_scale.data) {
        constexpr double first_scale = 65536;
        const float scale = static_cast<float>(options.loss_scale > 0 ? options.loss_scale : first_scale);
        const int32_t counts[2] = {0, 1};
        copy_bytes(loss_scale.data, &scale, sizeof scale);
        copy_bytes(loss_scale_counts.data, counts, sizeof counts);
    }
    for (int64_t k = options.micro_batches - 1; k >= 0; k--) {
        use_micro_batch(*this, k);
        make_cis(*this);
    }
}

void use_micro_batch(Model& m, int64_t k) {
    std::swap(m.waiting[m.micro_batch], m.activations);
    std::swap(m.waiting[k], m.activations);
    m.micro_batch = k;
}

std::vector<NamedTensor> loss_scale_tensors(const Model& m) {
    if (!m.loss_scale.data) return {};
    return {{"loss_scale.scale", m.loss_scale}, {"loss_scale.counts", m.loss_scale_counts}};
}

void set_dloss(Model& m, const float* dloss) {
    copy_bytes_async(m.context, m.dloss.data, dloss, sizeof *dloss);
}

void set_batch(Model& m, const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T,
               const int32_t* first, const int32_t* end) {
    const Axis& axis = m.options.context;
    CHECK(B * T <= m.options.batch_size * m.options.seq_len && T <= m.options.seq_len);
    CHECK(divisible_length(axis, T) == T);
    CHECK((!first || m.options.document_mask) && !end == (!first || m.config.causal));
    Activations& a = m.activations;
    reshape_activations(a, m.config, B, T / axis.ranks);
    if (has_pieces(m)) make_cis_of_pieces(m);
    copy_own_tokens(m, a.tokens, tokens);
    copy_own_tokens(m, a.targets, targets);
    a.mask = first ? a.first : Tensor{};
    if (first) copy_own_halves(m, a.first, first);
    a.mask_end = end ? a.end : Tensor{};
    if (end) copy_bytes_async(m.context, a.end.data, end, a.end.bytes());
    a.predicted = {};
}

void set_predicted(Model& m, const int32_t* ids) {
    Activations& a = m.activations;
    CHECK(!ids || m.options.predicted_rows > 0);
    a.predicted = ids ? a.predicted_ids : Tensor{};
    if (ids) copy_bytes_async(m.context, a.predicted_ids.data, ids, a.predicted_ids.bytes());
}

void forward(Model& m) {
    begin_fp8_pass(m, false, true);
    forward_stage(m);
    if (m.parameters.holds_head()) run_head(m, {});
}

void forward_layers(Model& m, bool first, int64_t chunk) {
    begin_fp8_pass(m, true, first);
    set_stale(m, first, m.parameters.segment_of(m.parameters.layers[chunk].first));
    forward_trunk(m, true, chunk);
    join_exchanges(m);
}

void backward_layers(Model& m, bool first, bool last, int64_t chunk) {
    fork_exchanges(m);
    backward_half(m, {first, last}, chunk);
    join_exchanges(m);
    const Tensor gradient = own_rows(m, m.activations.dresidual);
    // The gradient of the next pass comes before this one has gone.
    if (m.outgoing.data && !m.context.dry_run)
        copy_bytes_async(m.context, m.outgoing.data, gradient.data, gradient.bytes());
}

void forward_backward(Model& m, bool first, bool last) {
    begin_fp8_pass(m, true, first);
    set_stale(m, first);
    const auto chunks = static_cast<int64_t>(m.parameters.layers.size());
    for (int64_t chunk = 0; chunk < chunks; chunk++) forward_trunk(m, true, chunk);
    for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) backward_half(m, {first, last}, chunk);
    if (last && sums_squares_in_backward(m)) sum_squares(m);
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
    forward_stage(m, &rows);
}

void logits_of_rows(Model& m, int64_t first, int64_t count, std::vector<float>& logits) {
    // A planned batch may be larger than the host's memory.
    if (!m.context.dry_run) logits.resize(static_cast<size_t>(count * m.whole.V));
    if (m.parameters.holds_head()) copy_logits(m, first, count, logits);
    share_logits(m, logits.data(), count);
}

void argmax_of_rows(Model& m, const Tensor& found) {
    CHECK((!m.tensor && !m.pipeline) || m.context.dry_run);
    if (!m.parameters.holds_head()) return;
    const Tensor all = reshape(found, {found.elements()});
    for_logits(m, 0, all.shape[0], [&](int64_t done, const Tensor& rows) {
        argmax(m.context, {.out = slice_rows(all, done, rows.shape[0]), .x = rows});
    });
}

void next_logits(Model& m, const int32_t* tokens, int64_t T, std::vector<float>& logits) {
    const int64_t length = divisible_length(m.options.context, T);
    std::vector<int32_t> padded(tokens, tokens + T);
    padded.resize(static_cast<size_t>(length), tokens[T - 1]);  // which the tokens before do not see
    // No losses are made: targets are not read.
    set_batch(m, padded.data(), padded.data(), 1, length);
    begin_fp8_pass(m, false, true);
    forward_stage(m);
    const auto [rank, row] = Pieces{m.options.context, length}.place(T - 1);
    if (m.context_ranks && m.parameters.holds_head())
        broadcast(m.context, *m.context_ranks, slice_rows(head_input(m), row, 1), rank);
    logits_of_rows(m, row, 1, logits);
}

}  // namespace llamac
