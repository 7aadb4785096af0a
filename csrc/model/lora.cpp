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

// A part of a matrix.
Tensor part_of(const Tensor& matrix, int64_t row, int64_t column, int64_t rows, int64_t columns) {
    Tensor part = matrix;
    part.data = static_cast<char*>(matrix.data) + (row * matrix.stride[0] + column) * size_of(matrix.dtype);
    part.shape[0] = rows, part.shape[1] = columns;
    return part;
}
Tensor columns_of(const Tensor& matrix, int64_t first, int64_t count) {
    return part_of(matrix, 0, first, matrix.shape[0], count);
}

// A target's block of a matrix [width, out] of its linear, or [out, width].
Tensor block_of(const Tensor& matrix, const LoraTarget& target, int64_t rank) {
    const int64_t first = target.index * rank;
    return target.joins_columns() ? part_of(matrix, target.first, first, target.outputs, rank)
                                  : part_of(matrix, first, target.first, rank, target.outputs);
}

void copy(const Model& m, const Tensor& to, const Tensor& from) {
    scale_rows(m.context, {.out = to, .x = from, .scale = 1.0, .accumulate = false});
}

const FlatParam& weight_of(const Model& m, int64_t layer, const LinearRow& row) {
    return m.parameters.blocks[layer].*row.weight;
}

// [left | right | zeros], of as many columns as the planned memory of the row has.
Tensor join(const Model& m, const LinearRow& row, const Tensor& left, const Tensor& right) {
    const Tensor& memory = m.lora->joined[index_of(row)];
    const Tensor joined = rows_of(memory, left.shape[0], memory.shape[1]);
    copy(m, columns_of(joined, 0, left.shape[1]), left);
    copy(m, columns_of(joined, left.shape[1], right.shape[1]), right);
    return joined;
}

template <class Call>
void for_targets(const Model& m, int64_t layer, const LinearRow& row, const Call& call) {
    for (const LoraTarget& target : m.lora->targets)
        if (target.adapter == row.adapter)
            call(target, (m.parameters.blocks[layer].*row.adapter).b[target.index]);
}

// scale · Bᵀ of the layer's linear, or scale · B.
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

// The spare columns of the weight become scale · B.
void join_b(Model& m, int64_t layer, const LinearRow& row, const Tensor& weight) {
    const Tensor& b = scaled_b(m, layer, row);
    copy(m, columns_of(weight, weight.shape[1] - b.shape[1], b.shape[1]), b);
}

// [weight ; A ; zeros]
Tensor join_a(Model& m, int64_t layer, const LinearRow& row, const Tensor& weight, const Tensor& a) {
    const int64_t rows = weight.shape[0], spare = weight_of(m, layer, row).spare_rows, width = a.shape[0];
    const Tensor joined = rows_of(weight, rows + spare, weight.shape[1]);
    copy(m, part_of(joined, rows, 0, width, a.shape[1]), a);
    const Tensor rest = part_of(joined, rows + width, 0, spare - width, a.shape[1]);
    if (!m.context.dry_run && rest.shape[0])
        CHECK(hipMemsetAsync(rest.data, 0, static_cast<size_t>(rest.bytes()), m.context.stream));
    return joined;
}

}  // namespace

void check_lora(const Config& config, const Lora& lora) {
    if (lora.rank > 0 && (!config.is_gated() || config.is_fused))
        fail(
            "--lora: expected a model with the linears q, k, v, o, gate, up and down (llama, mistral, qwen2, "
            "qwen3, olmo2), found ",
            config.model_type);
}

void plan_lora(LoraState& state, const Config& c, const Parameters& p, const ModelOptions& o, Arena& arena) {
    state.targets = lora_targets(c, o.lora);
    const BlockParameters& first = p.blocks[p.layers.front().first];
    const int64_t N = o.rows();
    int64_t largest = 0, widest = 0, joined = 0;
    for (const LinearRow& row : block_linears) {
        if ((first.*row.adapter).a.shape.empty()) continue;
        const FlatParam& weight = first.*row.weight;
        const int64_t width = (first.*row.adapter).a.shape[0], outputs = weight.shape[0],
                      inputs = weight.shape[1], columns = weight.spare_columns, rows = weight.spare_rows;
        const auto plan = [&](auto& tensors, std::initializer_list<int64_t> shape) {
            arena.plan("adapters", &tensors[index_of(row)], shaped(o.precision.weights, shape));
        };
        columns ? plan(state.b, {outputs, columns}) : plan(state.b, {width, outputs});
        if (columns) plan(state.joined, {N, inputs + columns});
        if (rows) plan(state.joined, {N, outputs + rows});
        if (columns) joined = std::max(joined, inputs + columns);
        largest = std::max(largest, width * outputs), widest = std::max(widest, width);
    }
    if (joined) arena.plan("adapters", &state.joined_dx, shaped(o.precision.weights, {N, joined}));
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
    const auto reset = [](const Tensor& t) {
        if (t.data) CHECK(hipMemset(t.data, 0, static_cast<size_t>(t.bytes())));
    };
    std::ranges::for_each(state.b, reset);
    std::ranges::for_each(state.joined, reset);
    reset(state.base);
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
                  const Tensor& weight, const Tensor& residual, const Tensor& bias, bool again) {
    const Tensor a = m.parameters.weight((m.parameters.blocks[layer].*row.adapter).a);
    const Tensor low = rows_of(low_of(m, layer, row), x.shape[0], a.shape[0]);
    if (!again) matmul_forward(m.context, {.out = low, .x = x, .weight = a});
    const bool joins = weight_of(m, layer, row).spare_columns > 0;
    if (joins) join_b(m, layer, row, weight);
    matmul_forward(m.context, {.out = out,
                               .x = joins ? join(m, row, x, low) : x,
                               .weight = weight,
                               .residual = residual,
                               .bias = bias});
    if (joins) return;
    matmul_backward_input(m.context,
                          {.dx = out, .dout = low, .weight = scaled_b(m, layer, row), .accumulate = true});
}

void lora_backward_input(Model& m, int64_t layer, const LinearRow& row, const Tensor& dx, const Tensor& dout,
                         const Tensor& weight) {
    const Tensor a = m.parameters.weight((m.parameters.blocks[layer].*row.adapter).a);
    const int64_t N = dout.shape[0], C = a.shape[1];
    const Tensor dlow = rows_of(m.lora->dlow, N, a.shape[0]);
    const auto multiply = [&](const Tensor& to, const Tensor& from, const Tensor& by, bool accumulate) {
        matmul_backward_input(m.context, {.dx = to, .dout = from, .weight = by, .accumulate = accumulate});
    };
    if (weight_of(m, layer, row).spare_columns) {
        join_b(m, layer, row, weight);
        const Tensor joined = rows_of(m.lora->joined_dx, N, weight.shape[1]);
        multiply(joined, dout, weight, false);
        copy(m, dlow, columns_of(joined, C, dlow.shape[1]));
        if (dx.data) copy(m, dx, columns_of(joined, 0, C));
    } else {
        matmul_forward(m.context, {.out = dlow, .x = dout, .weight = scaled_b(m, layer, row)});
        if (!dx.data) return;
        if (weight_of(m, layer, row).spare_rows)
            return multiply(dx, join(m, row, dout, dlow), join_a(m, layer, row, weight, a), false);
        multiply(dx, dout, weight, false);
    }
    if (dx.data) multiply(dx, dlow, a, true);
}

void lora_backward_weight(Model& m, int64_t layer, const LinearRow& row, const Tensor& dout, const Tensor& x,
                          bool accumulate) {
    const Parameters& p = m.parameters;
    const Tensor da = p.gradient((p.blocks[layer].*row.adapter).a);
    const int64_t N = x.shape[0], width = da.shape[0];
    matmul_backward_weight(
        m.context,
        {.dweight = da, .dout = rows_of(m.lora->dlow, N, width), .x = x, .accumulate = accumulate});
    const Tensor low = rows_of(low_of(m, layer, row), N, width);
    const bool joins = weight_of(m, layer, row).spare_columns > 0;
    const Tensor &left = joins ? dout : low, &right = joins ? low : dout;
    const Tensor db = rows_of(m.lora->db, left.shape[1], right.shape[1]);
    matmul_backward_weight(m.context, {.dweight = db, .dout = left, .x = right, .accumulate = false});
    const Lora& lora = m.options.lora;
    for_targets(m, layer, row, [&](const LoraTarget& target, const FlatParam& own) {
        scale_rows(m.context, {.out = p.gradient(own),
                               .x = block_of(db, target, lora.rank),
                               .scale = lora.scale(),
                               .accumulate = accumulate});
    });
}

}  // namespace llamac
