// A training run without its loop: model, data and optimizer steps. evaluate.h and save.h have functions over it.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "checkpoint/tokenizer_files.h"
#include "core/device_memory.h"
#include "model/optimizer.h"
#include "model/pipeline.h"
#include "platform/stream.h"
#include "run/options.h"
#include "run/ranks.h"
#include "run/schedule.h"
#include "train/batch_queue.h"
#include "train/run_data.h"
#include "train/verify.h"

namespace llamac {

// Values of a tensor beyond the largest of its fp8 type, in an optimizer step on all ranks.
struct Saturated {
    std::string tensor;  // slot_name() of model/fp8.h
    int64_t values = 0, of = 0;
};

// The result of an optimizer step.
struct StepResult {
    int64_t step = 0;      // from 1
    double loss = 0;       // nats per token: the mean over the step's tokens
    double grad_norm = 0;  // before clipping
    double lr = 0;
    // Since the end of the step before, or the start of this one if none was in flight.
    double ms = 0;
    bool skipped = false;   // not finite, and --skip-nonfinite or a scale: weights and moments are as before
    double loss_scale = 0;  // with --dtype fp16, of the step's gradients
    std::vector<Saturated> saturated = {};  // of tensors with any
};

// Seconds of the parts of a start.
struct StartTimes {
    double ranks = 0;       // until they are connected
    double weights = 0;     // to draw or load them, with the rest of a checkpoint
    double tuning = 0;      // of matrix products, in the first step
    double graphs = 0;      // to capture them, in the first two or three steps
    double first_step = 0;  // tuning included
    double total = 0;       // from the start of the program to the end of the first step
};

struct Trainer {
    // Reads the model, the data and the checkpoint to resume; writes nothing. If the run does not fit, the Error names the
    // smallest change that makes it fit. ahead: max_in_flight. With --dry-run the model is planned, nothing is allocated or
    // read, and only the members above `step` are valid. ranks: those of the run, each of which makes the same calls, with the
    // same options, model and data; for a dry run, the planned number.
    explicit Trainer(const Options& options, std::optional<int64_t> ahead = {},
                     const Ranks& ranks = one_rank);

    const Options options;
    std::string warnings;                // one line each
    void warn(const std::string& line);  // adds a line to the warnings, unless it is empty
    const Config config;
    const Ranks& ranks;
    const Mesh mesh;             // of the ranks
    const int64_t accumulation;  // micro-batches per step and rank
    int64_t data_skip;           // sequences of the data's order that the run has left out
    const RunData data;
    Model model;
    const int64_t max_in_flight;  // by default 1 on a GPU, 0 on a CPU
    BatchQueue batches;
    std::vector<TokenizerFile> tokenizer_files;  // of every checkpoint
    std::string resumed_from;                    // a checkpoint, or ""
    std::vector<std::string> damaged;  // names of checkpoints in --out that --resume auto passed over
    int64_t step = 0;                  // steps started
    StartTimes start;                  // total: the caller's

    // Called after each micro-batch (with several stages, each optimizer step), batch of validation or evaluation, and token of a
    // sample. If it throws, the current call is abandoned; of an optimizer step nothing remains.
    std::function<void()> between;
    // Called after each piece of a checkpoint (FileWriter), and each micro-batch of a stage.
    std::function<void()> written;

    // Enqueues the next step: micro-batches, gradient norm, AdamW. Returns before it is done, at most two micro-batches ahead
    // of the device; up to max_in_flight steps may be in flight when it is called.
    // fill: writes tokens and targets [B,T] of micro-batch `micro`; without it they come from the training data.
    // counted: the targets of all micro-batches and ranks over which the loss is a mean; without it, all of them, or, for
    // packed training data, those that are not ignore_index.
    using Fill = std::function<void(int64_t micro, int32_t* tokens, int32_t* targets)>;
    void start_step(const Fill& fill = {}, std::optional<int64_t> counted = {});
    int64_t in_flight() const { return step - finished; }
    // Whether later steps replay what is captured, or nothing is captured.
    bool has_started() const { return !replays || optimizer.graph; }
    // Waits for the oldest step in flight. Throws Error if it was verified and a result differs.
    StepResult finish_step();

    // The sum over data-parallel ranks of a number that the ranks of a tensor and a context axis have alike. kind: as in
    // Ranks::gather.
    double sum_over_data(const char* kind, double number) const;
    // The mean over the ranks of this rank's context axis.
    double mean_over_context(const char* kind, double number) const;
    int64_t tokens_per_step() const { return tokens_per_rank() * mesh.data.ranks; }
    // In whole sequences.
    int64_t tokens_per_rank() const { return accumulation * options.batch_size * options.seq_len; }
    // Of forward and backward. An encoder's head counts for the rows that it computes.
    double flops_per_token() const;

  private:
    // Host memory that a step reads and writes.
    struct StepBuffers {
        StepBuffers(int64_t tokens, int64_t hash_count, int64_t slots)
            : losses(tokens), hashes(hash_count), saturated(slots) {}
        PinnedMemory<float> losses;
        PinnedMemory<double> squares{2};  // of the gradients; of the losses, with --skip-nonfinite
        PinnedMemory<float> dloss{1}, lr{1}, loss_scale{1};
        PinnedMemory<int32_t> step{1};
        PinnedMemory<double> hashes;      // of a verified step
        PinnedMemory<int32_t> saturated;  // per scale of fp8
        double of_counted = 1;            // of the mean over all tokens, which makes it the step's loss
    };
    // Work that is the same in every step: launched the first time, then captured and replayed.
    struct CapturedGraph {
        bool launched = false;
        bool settled = false;  // the last launch was final: nothing it creates or chooses is new
        std::optional<Graph> graph;
    };
    // Names and values that must be the same on all ranks besides the options.
    std::vector<std::pair<std::string, std::string>> facts() const;
    AdamW adamw() const;
    // Takes rank 0's algorithms of matrix products.
    void agree_with_ranks();
    // After the first step of a pipeline, which times the products of each rank by itself: from now on, all ranks compute a product
    // by the same algorithm, as a resumed run does by the one in the checkpoint. Graphs that were captured are captured again.
    void agree_on_products();
    bool is_verified(int64_t number) const;  // number: from 1
    void launch(CapturedGraph& captured, const std::function<void()>& work);
    void fill_batches(const Fill& fill);
    void queue_micro_batches(StepBuffers& buffers, bool verified);
    // All micro-batches. pass: of a verified step, which computes them twice, as Verifier::end_micro_batch takes it; none: not
    // verified.
    void queue_passes(StepBuffers& buffers, std::optional<int> pass);
    void queue_micro_batch(int64_t micro, StepBuffers& buffers, std::optional<int> pass);
    // The same through this stage, where there are several.
    void queue_pipeline(StepBuffers& buffers, std::optional<int> pass);
    void queue_stage(const PipelinePass& work, StepBuffers& buffers, std::optional<int> pass);
    // After a backward pass.
    void end_micro_batch(int64_t micro, StepBuffers& buffers, std::optional<int> pass);
    // Waits for the micro-batch before the last: the device still computes one, so the wait costs nothing, and a signal
    // waits for one micro-batch instead of a step.
    void wait_for_device();
    // The end of step `steps`, or the start of the next one if that was later.
    const Event& end_of(int64_t steps) const;
    StepBuffers& buffers_of(int64_t number) { return buffers[static_cast<size_t>(number) % buffers.size()]; }
    // Over all ranks.
    std::vector<Saturated> saturated_tensors(const int32_t* counts) const;

    const bool replays;  // captured graphs
    CapturedGraph optimizer;
    // By what their launches depend on: whether the micro-batch is the last and the first one, and whether the head computes
    // predicted rows alone; of a pipeline's pass the micro-batch in flight, its chunk, and whether it is the backward pass.
    std::map<std::vector<int64_t>, CapturedGraph> passes;
    const std::vector<PipelineStep> schedule;  // of a stage, where there are several
    std::deque<StepBuffers> buffers;
    Event micro_ends[2];
    int64_t micro_batches_queued = 0;  // the end of micro-batch i, over all steps, is micro_ends[i % 2]
    std::optional<Verifier> verifier;  // --verify-every
    int64_t finished = 0;
    // Steps are timed on the stream, as the host sees an end late while it waits to enqueue the next step.
    std::deque<Event> ends;
};

}  // namespace llamac
