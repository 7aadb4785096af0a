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

// What the stream of exchanges begins with now comes after all that the model's stream has been given so far.
void follow_model(Model& m) {
    m.exchanges->computed.record(m.context.stream);
    m.exchanges->computed.wait_event(m.exchanges->stream.handle);
}

Context exchange_context(const Model& m) {
    Context context = m.context;
    context.stream = m.exchanges->stream.handle;
    return context;
}

// Calls it for each placement, all of them as one collective: all_gather or reduce_scatter of a type.
template <class Call>
void for_each_placement(Model& m, const char* name, DType dtype, int64_t segment, const Call& call) {
    const std::vector<Placement>& all = m.parameters.segments[static_cast<size_t>(segment)].placements;
    int64_t elements = 0;
    for (const Placement& placement : all) elements += m.ranks->size * placement.shard;
    const Context context = exchange_context(m);
    grouped(context, *m.ranks, name, elements * size_of(dtype), [&] {
        for (const Placement& placement : all) call(context, placement);
    });
}

void gather(Model& m, const Tensor& buffer, const Tensor& in_use, int64_t segment) {
    const Parameters& p = m.parameters;
    for_each_placement(
        m, "all_gather", buffer.dtype, segment, [&](const Context& context, const Placement& placement) {
            all_gather(context, *m.ranks, shards(p, in_use, placement), p.own(buffer, placement));
        });
}

size_t slot_of(const Model& m, int64_t segment) {
    return static_cast<size_t>(m.parameters.slot_of(segment));
}

// The slot's segment before this one has been computed with when the model's stream has got here.
void begin_to_gather(Model& m, int64_t segment) {
    const size_t slot = slot_of(m, segment);
    if (m.gathered[slot] == segment) return;
    follow_model(m);
    gather(m, m.parameters.weights, m.parameters.weights_of(segment), segment);
    m.exchanges->gathered[slot].record(m.exchanges->stream.handle);
    m.gathered[slot] = segment;
}

}  // namespace

void fork_exchanges(Model& m) {
    if (is_alone(m)) return;
    m.reducing = {};
    follow_model(m);
}

void join_exchanges(Model& m) {
    if (is_alone(m)) return;
    m.exchanges->done.record(m.exchanges->stream.handle);
    m.exchanges->done.wait_event(m.context.stream);
}

void gather_weights(Model& m, int64_t segment, int64_t next) {
    if (is_alone(m) || !m.options.sharding.shares_weights()) return;
    begin_to_gather(m, segment);
    m.exchanges->gathered[slot_of(m, segment)].wait_event(m.context.stream);
    if (next >= 0 && next < static_cast<int64_t>(m.parameters.segments.size())) begin_to_gather(m, next);
}

void begin_gradients(Model& m, int64_t segment, const Pass& pass) {
    const Parameters& p = m.parameters;
    if (is_alone(m) || !p.sharding.shares_gradients()) return;
    const size_t slot = slot_of(m, segment);
    if (m.reducing[slot]) m.exchanges->reduced[slot].wait_event(m.context.stream);  // what the slot held
    m.reducing[slot] = false;
    if (pass.first) return;
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
    follow_model(m);
    for_each_placement(
        m, "reduce_scatter", in_use.dtype, segment, [&](const Context& context, const Placement& placement) {
            reduce_scatter(context, *m.ranks, p.own(p.gradients, placement), shards(p, in_use, placement));
        });
    if (p.sharding.level == 0) gather(m, p.gradients, in_use, segment);
    if (!p.sharding.shares_gradients()) return;
    m.exchanges->reduced[slot_of(m, segment)].record(m.exchanges->stream.handle);
    m.reducing[slot_of(m, segment)] = true;
}

void sum_over_ranks(Model& m, const Tensor& x) {
    if (is_alone(m)) return;
    follow_model(m);
    all_reduce(exchange_context(m), *m.ranks, x);
    join_exchanges(m);
}

void exchange_updated_weights(Model& m, int64_t segment) {
    const Parameters& p = m.parameters;
    if (is_alone(m) || !p.sharding.shares_states() || p.sharding.shares_weights()) return;
    follow_model(m);
    gather(m, p.weights, p.weights_of(segment), segment);
}

}  // namespace llamac
