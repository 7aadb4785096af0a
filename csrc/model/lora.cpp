#include "model/lora.h"

#include <algorithm>

#include "model/block.h"
#include "model/model.h"
#include "ops/operations.h"

namespace llamac {
namespace {

// Rows of planned memory, which a smaller batch does not fill.
Tensor rows_of(const Tensor& memory, int64_t rows, int64_t columns) {
    return make_tensor(memory.data, memory.dtype, {rows, columns});
}

const Tensor& low_of(const Model& m, int64_t layer, const LinearRow& row) {
    const auto rows = static_cast<int64_t>(block_linears.size());
    const int64_t place = (m.micro_batch * m.config.L + layer) * rows + index_of(row);
    return m.lora->low[place];
}

// A target's block of a matrix [width, out] of its linear.
Tensor block_of(const Tensor& matrix, const LoraTarget& target, int64_t rank) {
    Tensor block = matrix;
    block.data = static_cast<char*>(matrix.data) +
                 (target.index * rank * matrix.shape[1] + target.first) * size_of(matrix.dtype);
    block.shape[0] = rank, block.shape[1] = target.outputs;
    return block;
}

template <class Call>
void for_targets(const Model& m, int64_t layer, const LinearRow& row, const Call& call) {
    for (const LoraTarget& target : m.lora->targets)
        if (target.adapter == row.adapter)
            call(target, (m.parameters.blocks[layer].*row.adapter).b[target.index]);
}

// scale · Bᵀ of the layer's linear.
const Tensor& scaled_b(Model& m, int64_t layer, const LinearRow& row) {
    const Tensor& b = m.lora->b[index_of(row)];
    const Lora& lora = m.options.lora;
    for_targets(m, layer, row, [&](const LoraTarget& target, const FlatParam& own) {
        scale_rows(m.context, {.out = block_of(b, target, lora.rank),
                               .x = m.parameters.weight(own),
                               .scale = lora.scale(),
                               .accumulate = false});
    });
    return b;
}

}  // namespace

void check_lora(const Config& config, const Lora& lora) {
    if (lora.rank > 0 && !config.is_gated())
        fail(
            "--lora: expected a model with the linears q, k, v, o, gate, up and down (llama, mistral, qwen2, "
            "qwen3), found ",
            config.model_type);
}

void plan_lora(LoraState& state, const Config& c, const Parameters& p, const ModelOptions& o, Arena& arena) {
    state.targets = lora_targets(c, o.lora);
    const BlockParameters& first = p.blocks[p.layers.front().first];
    const int64_t N = o.rows();
    int64_t largest = 0, widest = 0;
    for (const LinearRow& row : block_linears) {
        if ((first.*row.adapter).a.shape.empty()) continue;
        const int64_t width = (first.*row.adapter).a.shape[0], outputs = (first.*row.weight).shape[0];
        arena.plan("adapters", &state.b[index_of(row)], shaped(o.precision.weights, {width, outputs}));
        largest = std::max(largest, width * outputs), widest = std::max(widest, width);
    }
    arena.plan("adapters", &state.db, shaped(o.precision.gradients, {largest}));
    arena.plan("adapters", &state.dlow, shaped(o.precision.weights, {N * widest}));
    arena.plan("adapters", &state.base, shaped(DType::f64, {4}));
    state.low.resize(static_cast<size_t>(o.micro_batches * c.L) * block_linears.size());
    for (size_t i = 0; i < state.low.size(); i++) {
        const auto& adapter = first.*block_linears[i % block_linears.size()].adapter;
        const int64_t layer = static_cast<int64_t>(i / block_linears.size()) % c.L;
        if (!adapter.a.shape.empty() && p.holds(layer))
            arena.plan("activations", &state.low[i], shaped(o.precision.weights, {N, adapter.a.shape[0]}));
    }
}

void reset_lora(const LoraState& state) {
    for (const Tensor& t : {state.b[0], state.b[1], state.b[2], state.b[3], state.base})
        if (t.data) CHECK(hipMemset(t.data, 0, static_cast<size_t>(t.bytes())));
}

void hash_base(Model& m) {
    if (m.options.tensor.ranks > 1 || m.options.pipeline.ranks > 1) return;
    double* to = static_cast<double*>(m.lora->base.data);
    for (const Tensor& weights : {m.parameters.frozen, m.parameters.codes}) {
        if (weights.data)
            hash(m.context,
                 {.sum = make_tensor(to, DType::f64, {2}),
                  .x = make_tensor(weights.data, DType::bf16, {weights.bytes() / size_of(DType::bf16)})});
        to += 2;
    }
}

bool has_adapter(const Model& m, const LinearRow& row) {
    return m.lora && m.lora->b[index_of(row)].data;
}

void lora_forward(Model& m, int64_t layer, const LinearRow& row, const Tensor& out, const Tensor& x,
                  bool again) {
    const Tensor a = m.parameters.weight((m.parameters.blocks[layer].*row.adapter).a);
    const Tensor low = rows_of(low_of(m, layer, row), x.shape[0], a.shape[0]);
    if (!again) matmul_forward(m.context, {.out = low, .x = x, .weight = a});
    matmul_backward_input(m.context,
                          {.dx = out, .dout = low, .weight = scaled_b(m, layer, row), .accumulate = true});
}

void lora_backward_input(Model& m, int64_t layer, const LinearRow& row, const Tensor& dx,
                         const Tensor& dout) {
    const Tensor a = m.parameters.weight((m.parameters.blocks[layer].*row.adapter).a);
    const Tensor dlow = rows_of(m.lora->dlow, dout.shape[0], a.shape[0]);
    matmul_forward(m.context, {.out = dlow, .x = dout, .weight = scaled_b(m, layer, row)});
    if (dx.data) matmul_backward_input(m.context, {.dx = dx, .dout = dlow, .weight = a, .accumulate = true});
}

void lora_backward_weight(Model& m, int64_t layer, const LinearRow& row, const Tensor& dout, const Tensor& x,
                          bool accumulate) {
    const Parameters& p = m.parameters;
    const Tensor da = p.gradient((p.blocks[layer].*row.adapter).a);
    const int64_t N = x.shape[0], width = da.shape[0];
    matmul_backward_weight(
        m.context,
        {.dweight = da, .dout = rows_of(m.lora->dlow, N, width), .x = x, .accumulate = accumulate});
    const Tensor db = rows_of(m.lora->db, width, dout.shape[1]);
    matmul_backward_weight(
        m.context,
        {.dweight = db, .dout = rows_of(low_of(m, layer, row), N, width), .x = dout, .accumulate = false});
    const Lora& lora = m.options.lora;
    for_targets(m, layer, row, [&](const LoraTarget& target, const FlatParam& own) {
        scale_rows(m.context, {.out = p.gradient(own),
                               .x = block_of(db, target, lora.rank),
                               .scale = lora.scale(),
                               .accumulate = accumulate});
    });
}

}  // namespace llamac
