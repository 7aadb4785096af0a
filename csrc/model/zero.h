// The exchanges between data-parallel ranks during an optimizer step (model/sharding.h). A single rank exchanges nothing.
//
// At every level, the gradient of each flat parameter is summed by a reduce_scatter of its shards within the group and,
// once per optimizer step, by an all_reduce of each shard over the groups, in the type of Sharding::sums. Other ranks' data
// is gathered within the group: at level 0 the gradients, at levels 1 and 2 the updated weights, most of them in the next
// forward pass, and at level 3 the weights of a segment before it computes. So levels differ in which rank holds which data,
// and in no sum of a single micro-batch.
//
// All exchanges run on a separate stream (model/exchanges.h), concurrently with the kernels of other segments. Every
// pass begins with a fork of the model's stream and ends with a join, so that one graph records both. Partial gradients
// are first summed over the tensor axis (model/tensor_parallel.h).
#pragma once
#include "model/model.h"

namespace llamac {

// A micro-batch of an optimizer step.
struct MicroBatch {
    bool first, last;
};

// Around all that follows.
void fork_exchanges(Model& model);
void join_exchanges(Model& model);
// The first segments, whose updated weights the optimizer step gathers at levels 1 and 2, beside AdamW of the others: the next
// forward pass begins with them, and gathers each of the others while the segment before it computes.
constexpr int64_t gathered_by_optimizer = 2;
// Whether the weights of other ranks' shards, from segment `first` on, may be from before the last optimizer step: then
// gather_weights() gathers them, in whatever reads them first. A pass of training says it by its place in the step alone, as it is
// captured and replayed.
void set_stale(Model& model, bool stale, int64_t first = 0);
// Before a segment computes. next: the following segment (-1: none), gathered meanwhile unless its buffer overlaps.
void gather_weights(Model& model, int64_t segment, int64_t next);
// Whether kernels add to the gradients of earlier micro-batches. Sharded gradients are added after their reduction instead.
bool accumulates_in_place(const Model& model, const MicroBatch& micro_batch);
// Before kernels write the segment's gradients: waits for the reduction that still reads their memory.
void begin_gradients(Model& model, int64_t segment);
// When the segment's gradients are complete. Shared gradients are summed over the group after each micro-batch, others after
// the last one, as is the sum over the groups.
void reduce_gradients(Model& model, int64_t segment, const MicroBatch& micro_batch);
// Before the segment's summed gradients are read: waits for its reduction in this pass.
void wait_for_reduction(Model& model, int64_t segment);
// x = its sum over all data-parallel ranks, or over those of the group, which hold all shards between them.
void sum_over_ranks(Model& model, const Tensor& x);
void sum_over_shards(Model& model, const Tensor& x);
// x = its largest value over all ranks.
void max_over_ranks(Model& model, const Tensor& x);
// When all weights of the segment are updated.
void exchange_updated_weights(Model& model, int64_t segment);

}  // namespace llamac
