#include "model/exchange.h"

#include "ops/operations.h"
#include "platform/ranges.h"

namespace llamac {
namespace {

// Or plans alone.
bool is_alone(const Model& m) {
    return m.options.sharding.ranks == 1 || m.context.dry_run;
}

// A placement's shards of all ranks, [ranks * shard], in the tensor of its segment.
Tensor shards(const Parameters& p, const Tensor& segment, const Placement& placement) {
    const int64_t at = placement.offset - p.segments[static_cast<size_t>(placement.segment)].offset;
    return make_tensor(static_cast<char*>(segment.data) + at * size_of(segment.dtype), segment.dtype,
                       {p.sharding.ranks * placement.shard});
}

// Calls it for each placement, all of them as one collective: all_gather or reduce_scatter of a type.
template <class Call>
void for_each_placement(Model& m, const char* name, DType dtype, int64_t segment, const Call& call) {
    const std::vector<Placement>& all = m.parameters.segments[static_cast<size_t>(segment)].placements;
    int64_t elements = 0;
    for (const Placement& placement : all) elements += m.ranks->size * placement.shard;
    grouped(m.context, *m.ranks, name, elements * size_of(dtype), [&] {
        for (const Placement& placement : all) call(placement);
    });
}

void gather(Model& m, const Tensor& buffer, const Tensor& in_use, int64_t segment) {
    const Parameters& p = m.parameters;
    for_each_placement(m, "all_gather", buffer.dtype, segment, [&](const Placement& placement) {
        all_gather(m.context, *m.ranks, shards(p, in_use, placement), p.own(buffer, placement));
    });
}

}  // namespace

void gather_weights(Model& m, int64_t segment) {
    if (is_alone(m) || !m.options.sharding.shares_weights()) return;
    std::optional<int64_t>& held = m.gathered[static_cast<size_t>(m.parameters.slot_of(segment))];
    if (held == segment) return;
    gather(m, m.parameters.weights, m.parameters.weights_of(segment), segment);
    held = segment;
}

void begin_gradients(Model& m, int64_t segment, const Pass& pass) {
    const Parameters& p = m.parameters;
    if (is_alone(m) || !p.sharding.shares_gradients() || pass.first) return;
    const Tensor in_use = p.gradients_of(segment);
    CHECK(hipMemsetAsync(in_use.data, 0, static_cast<size_t>(in_use.bytes()), m.context.stream));
    for (const Placement& placement : p.segments[static_cast<size_t>(segment)].placements) {
        const Tensor from = p.own(p.gradients, placement), all = shards(p, in_use, placement);
        copy_bytes_async(m.context, static_cast<char*>(all.data) + p.sharding.rank * from.bytes(), from.data,
                         from.bytes());
    }
}

void reduce_gradients(Model& m, int64_t segment, const Pass& pass) {
    const Parameters& p = m.parameters;
    if (is_alone(m) || (!p.sharding.shares_gradients() && !pass.last)) return;
    const Tensor in_use = p.gradients_of(segment);
    for_each_placement(m, "reduce_scatter", in_use.dtype, segment, [&](const Placement& placement) {
        reduce_scatter(m.context, *m.ranks, p.own(p.gradients, placement), shards(p, in_use, placement));
    });
    if (p.sharding.level == 0) gather(m, p.gradients, in_use, segment);
}

void sum_over_ranks(Model& m, const Tensor& x) {
    if (!is_alone(m)) all_reduce(m.context, *m.ranks, x);
}

void exchange_updated_weights(Model& m) {
    const Parameters& p = m.parameters;
    if (is_alone(m) || !p.sharding.shares_states() || p.sharding.shares_weights()) return;
    for (size_t segment = 0; segment < p.segments.size(); segment++)
        gather(m, p.weights, p.weights_of(static_cast<int64_t>(segment)), static_cast<int64_t>(segment));
}

}  // namespace llamac
