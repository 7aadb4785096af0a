#include "model/zero.h"

#include <algorithm>
#include <limits>

#include "model/tensor_parallel.h"
#include "ops/operations.h"
#include "platform/ranges.h"

namespace llamac {
namespace {

// Or plans alone.
bool is_alone(const Model& m) {
    return m.options.sharding.ranks == 1 || m.context.dry_run;
}

// The ranks that share.
Communicator& group_of(Model& m) {
    return m.group ? *m.group : *m.ranks;
}

// A flat parameter's shards of all ranks of a group, [group * shard], in the tensor of its segment.
Tensor shards(const Parameters& p, const Tensor& segment, const FlatParam& flat) {
    const int64_t at = flat.offset - p.segments[flat.segment].offset;
    return make_tensor(static_cast<char*>(segment.data) + at * size_of(segment.dtype), segment.dtype,
                       {p.sharding.group * flat.shard});
}

// This rank's of them.
Tensor own_shard(const Parameters& p, const Tensor& segment, const FlatParam& flat) {
    const Tensor all = shards(p, segment, flat);
    return make_tensor(static_cast<char*>(all.data) + p.sharding.place() * flat.shard * size_of(all.dtype),
                       all.dtype, {flat.shard});
}

// Later exchanges wait for the work that is enqueued on the model's stream.
void follow_model(Model& m) {
    m.exchanges->computed.record(m.context.stream);
    m.exchanges->computed.wait_event(m.exchanges->stream.handle);
}

Context exchange_context(const Model& m) {
    Context context = m.context;
    context.stream = m.exchanges->stream.handle;
    return context;
}

// Calls it for each flat parameter, grouped as one collective of that name and type. parts: shards moved per flat parameter.
template <class Call>
void for_each_flat_param(const Model& m, Communicator& among, const char* name, int64_t parts, DType dtype,
                         int64_t segment, const Call& call) {
    const std::vector<FlatParam>& all = m.parameters.segments[segment].flat_params;
    int64_t elements = 0;
    for (const FlatParam& flat : all) elements += parts * flat.shard;
    const Context context = exchange_context(m);
    grouped(context, among, name, elements * size_of(dtype), [&] {
        for (const FlatParam& flat : all) call(context, flat);
    });
}

// own: a rank's shard of a flat parameter.
template <class Own>
void gather(Model& m, int64_t segment, const Tensor& in_use, const Own& own) {
    Communicator& group = group_of(m);
    for_each_flat_param(m, group, "all_gather", group.size, in_use.dtype, segment,
                        [&](const Context& context, const FlatParam& flat) {
                            all_gather(context, group, shards(m.parameters, in_use, flat), own(flat));
                        });
}

// Weights that are not kept are made of the master's, as AdamW rounds them, in their place among the gathered ones.
void gather_own_weights(Model& m, int64_t segment) {
    const Parameters& p = m.parameters;
    const Tensor in_use = p.weights_of(segment);
    const bool kept = p.weights.data;
    const auto own = [&](const FlatParam& flat) {
        return kept ? p.own(p.weights, flat) : own_shard(p, in_use, flat);
    };
    if (!kept)
        for (const FlatParam& flat : p.segments[segment].flat_params)
            convert(exchange_context(m), {.out = own(flat), .x = p.own(p.master, flat), .accumulate = false});
    gather(m, segment, in_use, own);
}

// Unless the weights are there. The work enqueued so far has finished with those that overlap the segment's buffer.
void begin_to_gather(Model& m, int64_t segment) {
    const size_t index = m.parameters.buffer_of(segment);
    const bool shared = m.options.sharding.shares_weights();
    if (m.gathered[index] == segment || (!shared && segment < m.stale_from)) return;
    for (size_t other = 0; other < GatherBuffers::count; other++)
        if (m.parameters.weight_buffers.overlap(index, other)) m.gathered[other].reset();
    follow_model(m);
    m.exchanges->enqueue([&m, segment] { gather_own_weights(m, segment); });
    m.exchanges->record(m.exchanges->gathered[index]);
    m.gathered[index] = segment;
    if (!shared) m.stale_from = segment + 1;
}

// The padding of a flat parameter's shards holds values of other segments.
void zero_padding(Model& m, int64_t segment) {
    const Parameters& p = m.parameters;
    for (const FlatParam& flat : p.segments[segment].flat_params) {
        const Tensor all = shards(p, p.gradients_of(segment), flat);
        const int64_t elements = flat.elements(), bytes = size_of(all.dtype);
        if (all.elements() > elements)
            CHECK(hipMemsetAsync(static_cast<char*>(all.data) + elements * bytes, 0,
                                 static_cast<size_t>((all.elements() - elements) * bytes),
                                 m.exchanges->stream.handle));
    }
}

void reduce_among(Model& m, Communicator& among, const Tensor& x, Reduction reduction) {
    follow_model(m);
    m.exchanges->enqueue(
        [&m, &among, x, reduction] { all_reduce(exchange_context(m), among, x, reduction); });
    join_exchanges(m);
}

// Sums a segment's gradients over the ranks.
void reduce(Model& m, int64_t segment, const MicroBatch& micro_batch) {
    const Parameters& p = m.parameters;
    if (p.sharding.shares_gradients()) zero_padding(m, segment);
    const Context context = exchange_context(m);
    const Tensor in_use = p.gradients_of(segment);
    Tensor summed = in_use;
    if (p.sums.data) {
        summed = make_tensor(p.sums.data, p.sums.dtype, {in_use.elements()});
        convert(context, {.out = summed, .x = in_use, .accumulate = false});
    }
    // Sums that are still converted or added replace this rank's term.
    const bool adds = p.sharding.shares_gradients() && !micro_batch.first, in_place = adds || p.sums.data;
    const auto own = [&](const FlatParam& flat) {
        return in_place ? own_shard(p, summed, flat) : p.own(p.gradients, flat);
    };
    Communicator& group = group_of(m);
    for_each_flat_param(m, group, "reduce_scatter", group.size, summed.dtype, segment,
                        [&](const Context& on, const FlatParam& flat) {
                            reduce_scatter(on, group, own(flat), shards(p, summed, flat));
                        });
    const std::vector<FlatParam>& flat_params = p.segments[segment].flat_params;
    const bool over_groups = m.replicas && micro_batch.last;
    if (over_groups) {
        if (adds)
            for (const FlatParam& flat : flat_params)
                convert(context, {.out = own(flat), .x = p.own(p.gradients, flat), .accumulate = true});
        for_each_flat_param(
            m, *m.replicas, "all_reduce", 2, summed.dtype, segment,
            [&](const Context& on, const FlatParam& flat) { all_reduce(on, *m.replicas, own(flat)); });
    }
    if (p.sharding.level == 0) gather(m, segment, summed, own);
    if (in_place && p.sharding.level == 0)
        convert(context, {.out = in_use, .x = summed, .accumulate = false});
    else if (in_place)
        for (const FlatParam& flat : flat_params)
            convert(context,
                    {.out = p.own(p.gradients, flat), .x = own(flat), .accumulate = adds && !over_groups});
}

}  // namespace

void fork_exchanges(Model& m) {
    if (is_alone(m)) return;
    m.gathered = {};
    follow_model(m);
}

void join_exchanges(Model& m) {
    if (is_alone(m)) return;
    m.exchanges->record(m.exchanges->done);
    m.exchanges->wait(m.exchanges->done, m.context.stream);
    m.exchanges->reducing.assign(m.exchanges->reducing.size(), false);
}

void set_stale(Model& m, bool stale, int64_t first) {
    m.stale_from = stale ? std::max(first, gathered_by_optimizer) : std::numeric_limits<int64_t>::max();
}

void gather_weights(Model& m, int64_t segment, int64_t next) {
    if (is_alone(m) || !m.options.sharding.shares_states()) return;
    const Parameters& p = m.parameters;
    const size_t index = p.buffer_of(segment);
    begin_to_gather(m, segment);
    if (m.gathered[index] == segment) m.exchanges->wait(m.exchanges->gathered[index], m.context.stream);
    if (next < 0 || next >= static_cast<int64_t>(p.segments.size())) return;
    if (!p.weight_buffers.overlap(p.buffer_of(segment), p.buffer_of(next))) begin_to_gather(m, next);
}

bool accumulates_in_place(const Model& m, const MicroBatch& micro_batch) {
    return !micro_batch.first && !m.options.sharding.shares_gradients();
}

void begin_gradients(Model& m, int64_t segment) {
    if (is_alone(m) || !m.options.sharding.shares_gradients()) return;
    const Parameters& p = m.parameters;
    for (int64_t other = 0; other < std::ssize(p.segments); other++)
        if (p.gradient_buffers.overlap(p.buffer_of(segment), p.buffer_of(other)))
            wait_for_reduction(m, other);
}

void wait_for_reduction(Model& m, int64_t segment) {
    if (is_alone(m) || !m.exchanges->reducing[segment]) return;
    m.exchanges->wait(m.exchanges->reduced[segment], m.context.stream);
    m.exchanges->reducing[segment] = false;
}

void reduce_gradients(Model& m, int64_t segment, const MicroBatch& micro_batch) {
    if (!m.parameters.sharding.shares_gradients() && !micro_batch.last) return;
    sum_partial_gradients(m, segment);
    if (is_alone(m)) return;
    follow_model(m);
    m.exchanges->enqueue([&m, segment, micro_batch] { reduce(m, segment, micro_batch); });
    m.exchanges->record(m.exchanges->reduced[segment]);
    m.exchanges->reducing[segment] = true;
}

void sum_over_ranks(Model& m, const Tensor& x) {
    if (!is_alone(m)) reduce_among(m, *m.ranks, x, Reduction::sum);
}

void sum_over_shards(Model& m, const Tensor& x) {
    if (!is_alone(m)) reduce_among(m, group_of(m), x, Reduction::sum);
}

void max_over_ranks(Model& m, const Tensor& x) {
    if (!is_alone(m)) reduce_among(m, *m.ranks, x, Reduction::max);
}

void exchange_updated_weights(Model& m, int64_t segment) {
    const Sharding& sharding = m.options.sharding;
    if (is_alone(m) || !sharding.shares_states() || sharding.shares_weights()) return;
    if (segment >= gathered_by_optimizer) return;
    follow_model(m);
    m.exchanges->enqueue([&m, segment] { gather_own_weights(m, segment); });
}

}  // namespace llamac
