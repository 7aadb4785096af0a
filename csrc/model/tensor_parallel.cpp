#include "model/tensor_parallel.h"

#include <algorithm>
#include <vector>

#include "core/device_memory.h"
#include "core/observer.h"
#include "ops/operations.h"

namespace llamac {
namespace {

bool is_divided(const Model& m) {
    return m.options.tensor.ranks > 1;
}

// The rows of all ranks.
Tensor all_rows(const Model& m, const Tensor& rows) {
    const int64_t count = m.config.stream_rows(rows.shape[0]) * m.options.tensor.ranks;
    return make_tensor(rows.data, rows.dtype, {count, rows.shape[1]});
}

Tensor ids_of_rank(const Model& m, const Tensor& ids, const Tensor& own, int64_t other) {
    const Tensor all = reshape(ids, {ids.elements()});
    if (!is_divided(m)) return all;
    const Tensor out = make_tensor(own.data, own.dtype, {all.elements()});
    const Axis& axis = m.options.tensor;
    vocabulary_ids(m.context, {.out = out,
                               .ids = all,
                               .first = axis.rank * tokens_per_rank(m.whole.V, axis.ranks),
                               .count = m.config.V,
                               .other = other});
    return out;
}

// An exchange of so many bytes, which a plan counts.
template <class Call>
void exchange(const Model& m, int64_t bytes, const Call& call) {
    if (m.tensor) return call(*m.tensor);
    if (is_divided(m)) plan_exchange(m.context, ExchangeAxis::tensor, m.options.tensor.ranks, bytes);
}

int64_t zero_row(const Model& m) {
    return m.config.padded_V() - 1;
}

}  // namespace

void plan_tensor_parallel(Model& m) {
    if (!is_divided(m)) return;
    const int64_t N = m.options.rows(), ranks = m.options.tensor.ranks, chunk = m.activations.logits.shape[0];
    if (N % ranks != 0)
        fail("--tp ", ranks, ": expected a divisor of --batch-size times --seq-len",
             m.options.context.ranks > 1 ? " / cp" : "", ", found ", N, " tokens");
    for (Tensor* ids : {&m.own_tokens, &m.own_targets}) m.arena.plan("tokens", ids, shaped(DType::i32, {N}));
    m.arena.plan("logits", &m.own_softmax, shaped(DType::f32, {chunk, 3}));
    m.arena.plan("logits", &m.softmax, shaped(DType::f32, {ranks, chunk, 3}));
    constexpr int64_t max_bytes = int64_t{64} << 20;
    int64_t largest = 0;
    for (const Parameter& each : m.parameters.table) largest = std::max(largest, each.slice.part(0));
    const int64_t all = largest * size_of(DType::f32) * ranks * m.options.sharding.ranks;
    m.arena.plan("parts of tensors for files", &m.collected,
                 shaped(DType::i32, {std::min(all, max_bytes) / 4}));
}

Tensor own_rows(const Model& m, const Tensor& rows) {
    if (!is_divided(m) || !rows.data) return rows;
    const int64_t count = m.config.stream_rows(rows.shape[0]), C = rows.shape[1];
    return make_tensor(
        static_cast<char*>(rows.data) + m.options.tensor.rank * count * C * size_of(rows.dtype), rows.dtype,
        {count, C});
}

void gather_rows(Model& m, const Tensor& rows) {
    if (!is_divided(m)) return;
    const Tensor all = all_rows(m, rows);
    exchange(m, all.bytes(),
             [&](Communicator& among) { all_gather(m.context, among, all, own_rows(m, rows)); });
}

void reduce_rows(Model& m, const Tensor& own, const Tensor& terms) {
    if (!is_divided(m)) return;
    const Tensor all = all_rows(m, terms);
    exchange(m, all.bytes(), [&](Communicator& among) { reduce_scatter(m.context, among, own, all); });
}

Tensor terms_of(const Model& m, const Tensor& own) {
    return is_divided(m) ? m.activations.dnorm : own;
}

void reduce_over_tensor(Model& m, const Tensor& x, Reduction reduction) {
    if (m.tensor) all_reduce(m.context, *m.tensor, x, reduction);
}

void sum_partial_gradients(Model& m, int64_t segment) {
    if (!is_divided(m)) return;
    std::vector<Tensor> partial;
    int64_t bytes = 0;
    for (const FlatParam& flat : m.parameters.segments[segment].flat_params) {
        if (!flat.partial) continue;
        partial.push_back(m.parameters.gradient(flat));
        bytes += 2 * partial.back().bytes();
    }
    if (partial.empty()) return;
    exchange(m, bytes, [&](Communicator& among) {
        grouped(m.context, among, "all_reduce", bytes, [&] {
            for (const Tensor& x : partial) all_reduce(m.context, among, x);
        });
    });
}

Tensor tokens_of_rank(const Model& m) {
    return ids_of_rank(m, m.activations.tokens, m.own_tokens, zero_row(m));
}

void clear_zero_row(const Model& m, const Tensor& dweight) {
    if (!is_divided(m) || m.context.dry_run) return;
    const int64_t bytes = dweight.shape[1] * size_of(dweight.dtype);
    CHECK(hipMemsetAsync(static_cast<char*>(dweight.data) + zero_row(m) * bytes, 0,
                         static_cast<size_t>(bytes), m.context.stream));
}

Tensor targets_of_rank(const Model& m) {
    constexpr int64_t no_column = -1;
    return ids_of_rank(m, m.activations.targets, m.own_targets, no_column);
}

void compute_losses(Model& m, const Tensor& losses, const Tensor& dlogits, const Tensor& logits,
                    const Tensor& targets, const Tensor& dlosses) {
    if (!is_divided(m))
        return cross_entropy(m.context, {.losses = losses,
                                         .dlogits = dlogits,
                                         .logits = logits,
                                         .targets = targets,
                                         .dlosses = dlosses,
                                         .dloss = 1.0,
                                         .ignore_index = int64_t{ignore_index}});
    const int64_t count = losses.shape[0];
    const Tensor own = make_tensor(m.own_softmax.data, DType::f32, {count, 3}),
                 all = make_tensor(m.softmax.data, DType::f32, {m.options.tensor.ranks, count, 3});
    softmax_parts(m.context, {.out = own, .logits = logits, .targets = targets});
    exchange(m, all.bytes(), [&](Communicator& among) { all_gather(m.context, among, all, own); });
    cross_entropy_parts(m.context, {.losses = losses,
                                    .dlogits = dlogits,
                                    .logits = logits,
                                    .targets = targets,
                                    .parts = all,
                                    .dlosses = dlosses,
                                    .dloss = 1.0,
                                    .ignore_index = int64_t{ignore_index}});
}

void gather_logits(Model& m, const Tensor& rows, float* to) {
    const int64_t width = m.config.padded_V(), tokens = tokens_per_rank(m.whole.V, m.tensor->size);
    const Tensor all = make_tensor(m.collected.data, rows.dtype, {m.tensor->size * width});
    std::vector<float> host(static_cast<size_t>(all.elements()));
    for (int64_t row = 0; row < rows.shape[0]; row++, to += m.whole.V) {
        char* const own = static_cast<char*>(rows.data) + row * rows.stride[0] * size_of(rows.dtype);
        all_gather(m.context, *m.tensor, all, make_tensor(own, rows.dtype, {width}));
        CHECK(hipStreamSynchronize(m.context.stream));
        copy_as(DType::f32, host.data(), all);
        for (int64_t rank = 0; rank < m.tensor->size; rank++)
            std::copy_n(host.begin() + rank * width, std::min(tokens, m.whole.V - rank * tokens),
                        to + rank * tokens);
    }
}

}  // namespace llamac
