#include "model/pipeline.h"

#include <algorithm>

#include "core/device_memory.h"
#include "model/block.h"
#include "model/tensor_parallel.h"
#include "model/zero.h"

namespace llamac {
namespace {

bool has_one_stage(const Model& m) {
    return !m.pipeline || m.context.dry_run;
}

int64_t elements_of(const std::vector<ParameterRow>& rows) {
    int64_t elements = 0;
    for (const ParameterRow& row : rows)
        if (row.present) elements += FlatParam{0, row.shape}.elements();
    return elements;
}

// Per parameter.
int64_t state_bytes(const Precision& p) {
    return size_of(p.weights) + size_of(p.gradients) + 2 * size_of(p.moments) +
           (p.keeps_master() ? size_of(info(p.weights).arithmetic) : 0);
}

// Of a layer, kept for the backward pass of a micro-batch.
int64_t activation_bytes(const Config& c, const ModelOptions& o) {
    int64_t bytes = 0;
    for (const auto& row : block_activations(c, o.batch_size, o.own_len(), o.precision.weights))
        if (row.present && !is_recomputed(o.recompute, row.member, 0, false)) bytes += row.like.bytes();
    return bytes;
}

// The tensor between two stages: this rank's rows of the residual stream, or of its gradient.
Tensor boundary(const Model& m, int64_t chunk, bool incoming, bool gradient) {
    const Activations& a = m.activations;
    const LayerRange& layers = m.parameters.layers[chunk];
    if (gradient) return !incoming && m.outgoing.data ? m.outgoing : own_rows(m, a.dresidual);
    return incoming ? block_input(m, layers.first) : a.blocks[layers.end - 1].residual_out;
}

}  // namespace

std::vector<LayerRange> parts_of(const Config& c, const ModelOptions& o) {
    const int64_t stages = o.pipeline.ranks, parts = stages * o.chunks;
    if (c.is_bert())
        fail("--pp ", stages,
             ": expected a model of type llama, mistral, qwen2, qwen3, phi3, olmo2 or gpt2, found bert");
    if (parts > c.L)
        fail("--pp ", stages, o.chunks > 1 ? " --pp-chunks " + std::to_string(o.chunks) : "",
             ": expected at least one layer per ", o.chunks > 1 ? "chunk" : "stage", ", found ", c.L,
             " layers");
    ModelParameters parameters;
    BlockParameters block;
    const int64_t state = state_bytes(o.precision),
                  layer_state = state * elements_of(block_parameters(c, block)),
                  layer_activations = activation_bytes(c, o);
    const double head = 6.0 * static_cast<double>(c.V * c.C),
                 layer = (flops_per_token(c, o.seq_len) - head) / static_cast<double>(c.L);
    struct Part {
        int64_t layers, kept, bytes_beside;
        double flops_beside;
    };
    std::vector<Part> all;
    for (int64_t part = 0; part < parts; part++)
        all.push_back(
            {1, kept_micro_batches({part % stages, stages}, o.micro_batches_per_step, o.chunks), 0, 0});
    all.front().bytes_beside = state * elements_of(parameters_before_blocks(c, parameters));
    all.back().bytes_beside = state * c.V * c.C, all.back().flops_beside = head;
    const auto with_another = [&](const Part& part) {
        const int64_t layers = part.layers + 1;
        return std::pair(part.flops_beside + static_cast<double>(layers) * layer,
                         part.bytes_beside + layers * (layer_state + part.kept * layer_activations));
    };
    for (int64_t left = c.L - parts; left > 0; left--)
        std::ranges::min_element(all, {}, with_another)->layers++;
    std::vector<LayerRange> found;
    int64_t first = 0;
    for (const Part& part : all) {
        found.push_back({first, first + part.layers});
        first += part.layers;
    }
    return found;
}

ModelOptions with_stage(const Config& config, const ModelOptions& options) {
    ModelOptions o = options;
    if (o.pipeline.ranks == 1) return o;
    const std::vector<LayerRange> parts = parts_of(config, o);
    for (int64_t chunk = 0; chunk < o.chunks; chunk++)
        o.layers.push_back(parts[chunk * o.pipeline.ranks + o.pipeline.rank]);
    o.micro_batches = o.training ? kept_micro_batches(o.pipeline, o.micro_batches_per_step, o.chunks) : 1;
    return o;
}

double bubble(int64_t stages, int64_t micro_batches, int64_t chunks) {
    return static_cast<double>(stages - 1) / static_cast<double>(micro_batches * chunks + stages - 1);
}

void transfer(Model& m, const std::vector<PipelineTransfer>& transfers) {
    if (has_one_stage(m)) return;
    std::vector<Transfer> all;
    for (const auto& [pass, peer, incoming] : transfers) {
        use_micro_batch(m, pass.micro_batch % m.options.micro_batches);
        // Since the step before, a batch of another shape may have been here.
        if (incoming) reshape_activations(m.activations, m.config, m.options.batch_size, m.options.own_len());
        all.push_back({boundary(m, pass.chunk, incoming, pass.backward), peer, incoming});
    }
    transfer(m.context, *m.pipeline, all);
}

void receive_input(Model& m, int64_t chunk) {
    const Axis& own = m.options.pipeline;
    if (!has_one_stage(m) && m.parameters.layers[chunk].first > 0)
        receive(m.context, *m.pipeline, boundary(m, chunk, true, false),
                (own.rank + own.ranks - 1) % own.ranks);
}

void send_output(Model& m, int64_t chunk) {
    const Axis& own = m.options.pipeline;
    if (!has_one_stage(m) && m.parameters.layers[chunk].end < m.config.L)
        send(m.context, *m.pipeline, boundary(m, chunk, false, false), (own.rank + 1) % own.ranks);
}

void finish_gradients(Model& m) {
    if (has_one_stage(m)) return;
    const Parameters& p = m.parameters;
    if (m.ends && p.is_tied && (p.holds_embedding() || p.holds_head())) {
        const FlatParam& flat = p.holds_embedding() ? p.embedding : p.head;
        // A rank that shards the states reads its own shard alone.
        if (flat.trains)
            all_reduce(m.context, *m.ends,
                       m.options.sharding.level == 0 ? p.gradient(flat) : p.own(p.gradients, flat));
    }
    if (m.loss_squares.data) broadcast(m.context, *m.pipeline, m.loss_squares, m.options.pipeline.ranks - 1);
}

void reduce_over_stages(Model& m, const Tensor& x, Reduction reduction) {
    if (!has_one_stage(m)) all_reduce(m.context, *m.pipeline, x, reduction);
}

void share_logits(Model& m, float* logits, int64_t count) {
    if (has_one_stage(m)) return;
    for (int64_t row = 0; row < count; row++, logits += m.whole.V) {
        if (m.parameters.holds_head()) copy_bytes(m.shared_logits.data, logits, m.shared_logits.bytes());
        broadcast(m.context, *m.pipeline, m.shared_logits, m.options.pipeline.ranks - 1);
        CHECK(hipStreamSynchronize(m.context.stream));
        copy_bytes(logits, m.shared_logits.data, m.shared_logits.bytes());
    }
}

}  // namespace llamac
