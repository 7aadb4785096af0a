// The token ids of the steps in flight: pinned host memory, device memory, and the copies between them.
#pragma once
#include <deque>
#include <optional>

#include "core/device_memory.h"
#include "data/tokens.h"
#include "model/model.h"
#include "platform/stream.h"

namespace llamac {

// A micro-batch in host memory: tokens, targets [B,T]; with --document-mask first [B,T], and where attention is not causal end
// [B,T], else null (find_documents, find_ends).
struct HostBatch {
    int32_t *tokens, *targets, *first, *end;
    int32_t* predicted;  // find_predicted(), with ModelOptions::predicted_rows, else null
};

class BatchQueue {
  public:
    // Plans device memory for `steps` steps of `micro_batches` micro-batches in the model's arena. marks: of the tokenizer.
    BatchQueue(Model& model, int64_t steps, int64_t micro_batches, const DocumentMarks& marks);
    void allocate();  // the host memory

    HostBatch host(int64_t step, int64_t micro = 0) const;
    // With --document-mask, fills `first` of rows of T tokens.
    void find_documents(const HostBatch& batch, int64_t rows, int64_t T) const;
    // Fills `end`, where it is not null, from `first`.
    void find_ends(const HostBatch& batch, int64_t rows, int64_t T) const;
    // Targets of the step that are not ignore_index.
    int64_t counted_targets(int64_t step) const;
    // Enqueues the copy to the device on a stream of its own; the model's stream waits for it.
    void copy(int64_t step, int64_t micro);
    // Sets the model's batch to a micro-batch that copy() has put on the device.
    void use(int64_t step, int64_t micro);

  private:
    struct StepTokens {
        Tensor tokens, targets, first, end, predicted;  // on the device, of all micro-batches
        std::vector<bool> is_predicted;                 // whether a micro-batch has few targets
        std::optional<PinnedMemory<int32_t>> host;      // the same as on the device, one after another
        Event copied;
    };
    StepTokens& of(int64_t step) { return queue[static_cast<size_t>(step) % queue.size()]; }

    Model& model;
    const int64_t micro_ids, step_ids;  // per micro-batch, per step
    const int64_t predicted_ids;        // per micro-batch
    const DocumentMarks marks;
    const Stream copies;
    std::deque<StepTokens> queue;
};

}  // namespace llamac
