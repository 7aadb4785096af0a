// A training run without its loop: the model, its data, a step, validation, sampling, saving.
#pragma once
#include <deque>
#include <functional>
#include <optional>
#include <string>

#include "checkpoint/async_saves.h"
#include "checkpoint/carried_files.h"
#include "checkpoint/checkpoint.h"
#include "data/tokenizer.h"
#include "data/tokens.h"
#include "model/optimizer.h"
#include "platform/stream.h"
#include "run/options.h"
#include "run/ranks.h"
#include "run/schedule.h"
#include "train/evaluation.h"
#include "train/step_result.h"
#include "train/verify.h"

namespace llamac {

struct Trainer {
    // Reads the model, the data and, where it goes on from one, the checkpoint; writes nothing. Throws Error, for a
    // run that the device has no memory for with the least change that would make it fit. ahead: most_in_flight.
    // After --dry-run the model is planned, and nothing is allocated or read: what follows is not to be called.
    // ranks: of the run, which every one of them calls the same functions of; for a dry run, as many as are planned.
    explicit Trainer(const Options& options, std::optional<int64_t> ahead = {},
                     const Ranks& ranks = one_rank);

    const Options options;
    std::string warnings;                // a line for each thing that was not taken over or looks wrong
    void warn(const std::string& line);  // adds the line to them; "" adds none
    const Config config;
    const Ranks& ranks;
    const int64_t accumulation;   // micro-batches per step and rank
    int64_t data_skip;            // sequences of the data's order that the run has left out
    std::optional<Loader> train;  // none: --train-data "", for whoever brings the batches
    std::optional<Loader> val;    // none: --val-data ""
    std::optional<Tokenizer> tokenizer;
    std::vector<Questions> questions;  // of --eval-tasks
    std::vector<CarriedFile> carried;  // into every checkpoint
    std::string resumed_from;          // a checkpoint, or ""
    std::vector<std::string> damaged;  // names of checkpoints in --out that --resume auto passed over
    Schedule schedule;
    Model model;
    int64_t step = 0;  // steps started
    bool replays;  // launches are recorded in graphs, which later steps replay, but where runs are observed

    // Between micro-batches, batches of validation and evaluation, and tokens of samples, each of them done. What it throws ends the
    // call: an optimizer step is abandoned then, and the trainer is as after the step before, once that is finished.
    std::function<void()> between;
    // After each piece of a checkpoint (FileWriter).
    std::function<void()> written;

    // Compares this rank's options, model and data with the others', and takes rank 0's algorithms of matrix products. Every
    // rank calls it, before anything else.
    void agree_with_ranks();

    // Puts the next step into the model's stream: micro-batches, gradient norm, AdamW. The host gathers its tokens and
    // goes on; so it may start the next before this one is done, by most_in_flight. It is never more than two
    // micro-batches ahead of the device.
    void start_step();
    // The same on batches of the caller's: fills tokens and targets [B,T] of micro-batch `micro`, counted from 0. With
    // --document-mask, where documents begin is found by the tokenizer's marks.
    using Batch = std::function<void(int64_t micro, int32_t* tokens, int32_t* targets)>;
    void start_step(const Batch& batch);
    // The same, of the mean over the targets that count: so many of all micro-batches and ranks. Of packed
    // training data, start_step() does this itself.
    void start_step(const Batch& batch, int64_t counted);
    int64_t in_flight() const { return step - finished; }
    const int64_t most_in_flight;  // unless told: 1 on a GPU, 0 where the host computes
    // Waits for the oldest step in flight. Throws Error where it was verified and a result differs.
    StepResult finish_step();

    // What follows wants no step in flight.

    // Mean loss over the validation batches. Only where there is validation data.
    double validate();
    // Mean loss over rows of T tokens, --batch-size of them at a time: fills tokens and targets [count,T] from row
    // `first` on.
    using Rows = std::function<void(int64_t first, int64_t count, int32_t* tokens, int32_t* targets)>;
    double mean_loss_of(int64_t rows, int64_t T, const Rows& fill);
    // Scores of --eval-tasks, in their order.
    std::vector<Score> evaluate();
    // What stands before a document: the tokenizer's, or else the model's first token.
    int32_t first_token() const;
    // What samples begin with: --sample-prompt-ids, else the first token.
    std::vector<int32_t> sample_prompt() const;
    // Tokens that the model writes after the prompt; the same of the same weights at the same step.
    std::vector<int32_t> sample(std::vector<int32_t> prompt, int64_t count, double temperature,
                                int64_t top_k);
    // Their text (Tokenizer::decode); without a tokenizer their ids.
    std::string text_of(const std::vector<int32_t>& ids) const;
    // Text as the flags say: --sample-tokens tokens after the first one, or --sample-prompt-ids and what follows.
    std::string sample();
    // Calls it for each parameter in turn, with its whole weight, which is there until it returns.
    void visit_weights(const std::function<void(const Parameter& parameter, const Tensor& weight)>& visit);
    // Writes OUT/step_NNNNNN into the run's folder; returns its path.
    std::string save(const OpenFolder& out);
    // Makes ready for start_save(), if the options ask for it; every rank calls it. Where a host has no room for the copy,
    // a warning says so, and save() is all there is.
    void prepare_async_saves();
    // save() while training goes on: returns when the state is copied. async->finish() comes before the next one.
    void start_save(const OpenFolder& out);
    std::optional<AsyncSaves> async;  // once it is ready
    // Whether the options ask for it, and a checkpoint comes before the last step's, which nothing goes on beside.
    bool saves_async() const;
    // What start_save() copies: this rank's weights and optimizer state.
    std::vector<NamedTensor> state() const;
    // Writes the same into a directory of any name, which must not exist. Among a run's checkpoints under the run's lock.
    void save_to(const std::string& directory);
    int64_t tokens_per_step() const { return tokens_per_rank() * ranks.count; }
    int64_t tokens_per_rank() const { return accumulation * options.batch_size * options.seq_len; }

  private:
    // What has to be the same on all ranks besides the options, by name.
    std::vector<std::pair<std::string, std::string>> facts() const;
    // What a step reads from and writes to host memory.
    struct StagingBuffers {
        StagingBuffers(int64_t tokens, bool document_mask, int64_t hashes, int64_t slots);
        PinnedMemory<int32_t> tokens, targets;  // of all micro-batches
        PinnedMemory<int32_t> first;            // likewise, with --document-mask
        Event copied;
        PinnedMemory<float> losses;
        PinnedMemory<double> squares;  // of the gradients; of the losses, with --skip-nonfinite
        PinnedMemory<float> dloss, lr;
        PinnedMemory<int32_t> step;
        PinnedMemory<double> hashes;      // of a step that is verified
        PinnedMemory<int32_t> saturated;  // of each slot of fp8
        double loss_scale = 1;            // from the mean over all tokens to the step's loss
    };
    // A flight's tokens, targets and, with --document-mask, their documents' first positions, copied ahead of the
    // micro-batch that wants them.
    struct TokenSlot {
        Tensor tokens, targets, first;
    };
    // Work that every step does alike: the first time launched as it is, which makes what is made once; then
    // recorded, and replayed.
    struct CapturedGraph {
        std::function<void()> work;
        bool launched = false;
        bool settled = false;  // its last launch was of what is launched from then on
        std::optional<Graph> graph;
    };
    void launch(CapturedGraph& work);
    // With --document-mask: `first` of `rows` rows of T tokens in the staging buffers.
    void find_documents(StagingBuffers& buffers, int64_t first_row, int64_t rows, int64_t T) const;
    // Fills tokens, targets and, with --document-mask, `first` of micro-batch `micro` in the staging buffers.
    using Fill = std::function<void(int64_t micro, StagingBuffers& buffers)>;
    Fill filled_by(const Batch& batch) const;
    // The next step's micro-batches, and the step: of the loss that is `loss_scale` times the mean over all tokens.
    StagingBuffers& fill_buffers(const Fill& fill);
    void run_step(StagingBuffers& buffers, double loss_scale);
    // Of a filled step, on all ranks: targets that count.
    int64_t counted_targets(const StagingBuffers& buffers) const;
    double scale_of(int64_t counted) const;
    double mean_over_ranks(double number) const;
    // Of all ranks, from the counts of this one's slots.
    std::vector<Saturated> saturated_tensors(const int32_t* counts) const;
    // Puts a validation batch into the first staging buffers; returns how many of its targets count.
    int64_t stage_validation(int64_t batch);
    // Mean loss of the rows in the first staging buffers, whose documents are found.
    double loss_of_staged(int64_t count, int64_t T);
    AdamW adamw() const;
    bool is_verified(int64_t step) const;  // from 1
    Manifest manifest() const;
    // copy: of the state(), to be written in its place.
    std::vector<CheckpointFile> files(const char* copy = nullptr);
    std::vector<NamedTensor> own_weights() const, own_optimizer_tensors() const;
    void write_weights(FileWriter& file);
    int64_t writer_of(const Parameter& parameter) const;  // the rank, of its weight
    std::string index_text() const;
    // Of the tokens in the staging buffers.
    void copy_tokens(int64_t micro, StagingBuffers& buffers, const TokenSlot& slot);
    // Its tokens are on the device.
    void queue_micro_batch(int64_t micro, StagingBuffers& buffers, const TokenSlot& slot);
    // Waits for the micro-batch two before the next one: then the device computes one, and the next one will be queued
    // long before it is done. So this costs nothing, and a signal waits for one micro-batch, not for a step.
    void wait_for_device();
    // Of the first `steps`; or, if that was later, when the next one began.
    const Event& end_of(int64_t steps) const;

    CapturedGraph micro_batches_by_place[2][2], optimizer;  // [is the last][is the first]
    const Stream copies;                                    // of ids to the device, beside the model's work
    std::deque<StagingBuffers> staging;                     // the step `step` is staging[step % size]
    std::vector<TokenSlot> token_slots;                     // of each flight
    Event micro_ends[2];
    int64_t micro_batches_queued = 0;  // the end of micro-batch i, over all steps, is micro_ends[i % 2]
    std::optional<Verifier> verifier;  // --verify-every
    int64_t finished = 0;
    // Steps are timed on the stream: the host hears late of an end while it waits for room to queue the next one.
    std::deque<Event> ends;
};

}  // namespace llamac
