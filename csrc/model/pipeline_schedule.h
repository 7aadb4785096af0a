// The order in which the stages of a pipeline compute the micro-batches of an optimizer step: 1F1B (Narayanan et al., "PipeDream",
// 2019) with one chunk of layers per stage, interleaved 1F1B (Narayanan et al., "Efficient Large-Scale Language Model Training on
// GPU Clusters Using Megatron-LM", 2021) with several. Chunk c of stage s is part c * stages + s of the model.
//
// After a warm-up of forward passes, a stage alternates between a forward and a backward pass. So it keeps the activations of few
// micro-batches, whatever their number.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "model/mesh.h"

namespace llamac {

// The forward or backward pass of a micro-batch through a chunk of this stage's layers.
struct PipelinePass {
    bool backward;
    int64_t micro_batch, chunk;

    bool operator==(const PipelinePass&) const = default;
};

// The input of a pass, which another stage has computed: of `pass` of the sender if outgoing, else for `pass` of this stage.
struct PipelineTransfer {
    PipelinePass pass;
    int64_t peer;
    bool incoming;
};

// A tick: a pass, and then the transfers of the next ones' inputs, which are one group: none of them waits for another of this stage.
// Some ticks of a stage have neither.
struct PipelineStep {
    std::optional<PipelinePass> pass;
    std::vector<PipelineTransfer> transfers;
};

// The ticks of a stage; all stages have the same number. Two stages that exchange something do it in the same tick. So transfers that
// block cannot wait for one another, and all stages can stop before a tick. Micro-batches: with several chunks, a multiple of the
// stages.
std::vector<PipelineStep> pipeline_schedule(const Axis& stage, int64_t micro_batches, int64_t chunks = 1);

// Micro-batches whose activations of a chunk a stage keeps at the same time, at most.
int64_t kept_micro_batches(const Axis& stage, int64_t micro_batches, int64_t chunks = 1);

}  // namespace llamac
