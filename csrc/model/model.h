// Llama: memory, forward, backward. docs/architecture.md follows one step.
#pragma once
#include <array>
#include <functional>
#include <limits>
#include <memory>
#include <optional>

#include "core/collectives.h"
#include "core/device_memory.h"
#include "core/dispatch.h"
#include "core/library_gemm.h"
#include "core/safetensors.h"
#include "model/activations.h"
#include "model/exchanges.h"
#include "model/lora.h"
#include "platform/stream.h"

namespace llamac {

struct Model {
    // Plans the memory: arena.bytes() for tensors and workspaces. Nothing is on the device yet. all: ranks of the mesh; null for one
    // rank, or for a plan alone.
    Model(const Config& config, const ModelOptions& options, Communicator* all = nullptr);
    Model(const Model&) = delete;
    // Takes the memory. Throws Error where the device has no room.
    void allocate();

    const Config whole;   // the model's sizes
    const Config config;  // this rank's: divided by the tensor axis
    const ModelOptions options;
    // With several stages: those of this rank's pipeline; of its first and last stage, null if those are all; of this rank's stage.
    const std::unique_ptr<Communicator> pipeline, first_and_last, stage;
    Communicator* const ends;   // the first and the last stage
    Communicator* const world;  // the ranks that hold the same layers; null for one
    // The ranks of this rank's tensor axis and of its context axis, null if it has one; those with the same part of the weights, null
    // if those are all or one.
    const std::unique_ptr<Communicator> tensor, context_ranks, data;
    Communicator* const ranks;  // that have the same part of the weights; null for one
    // With several groups: the ranks of this rank's group, and the ranks of all groups that hold the same shards.
    const std::unique_ptr<Communicator> group, replicas;
    const Stream stream;
    const KernelChoices kernels;
    GemmAlgorithms gemms;
    Context context;  // of all its calls
    Arena arena;
    Parameters parameters;
    Activations activations;           // of the micro-batch that the next calls see
    std::vector<Activations> waiting;  // of the others in flight; use_micro_batch() exchanges them
    int64_t micro_batch = 0;           // which one `activations` are of
    std::optional<Fp8State> fp8;
    std::optional<LoraState> lora;
    std::optional<KvCache> cache;
    Tensor frequency;  // f64 [rotary_size/2], of RoPE
    // With tensor parallelism (ops/vocabulary.hip): the batch's tokens and targets in this rank's part of the vocabulary, [N];
    // parts of the softmax of a chunk's rows, of this rank and of all.
    Tensor own_tokens, own_targets, own_softmax, softmax;
    // With several stages: the logits of a token; where they have several chunks, the gradient that goes to another one.
    Tensor shared_logits, outgoing;
    Tensor collected;  // with tensor parallelism: parts of tensors on their way to files (train/save.cpp)
    // With context parallelism: keys and values of whole sequences, [B,T,2*NKV*HD], and their gradients; the same as parts of the
    // ranks, as they are exchanged.
    Tensor keys, dkeys, key_parts;
    // [1] each, which kernels read where the weights are. dloss: f32, the factor of the losses' gradients, 1 / N for the mean
    // of N. squares: of the gradients. loss_squares: with skip_nonfinite or a scale, of the losses, the optimizer's guard.
    Tensor dloss, squares, lr, step, loss_squares;
    // With fp16 weights: the scale of the losses' gradients, dloss times it, and update_loss_scale's counts [1,2], whose second
    // is AdamW's step.
    Tensor loss_scale, scaled_dloss, loss_scale_counts;
    std::optional<Exchanges> exchanges;  // with several ranks
    // The segment that was gathered last of those that take turns in a buffer of shared weights.
    std::array<std::optional<int64_t>, GatherBuffers::count> gathered;
    // At levels 1 and 2: the segments from this one on may have the weights of other ranks from before the last optimizer step.
    int64_t stale_from = std::numeric_limits<int64_t>::max();
    // Where set, sees every activation and gradient, by its name in the debug state, while it holds its
    // value.
    std::function<void(const std::string& name, const Tensor& value)> hook;

  private:
    Tensor workspace_bytes;
    Workspace workspace;
};

// These functions enqueue work on the model's stream and return before it is done. Host memory that they read must not change
// until then. Copies from memory that is not pinned wait.

// The batch that the next calls see. tokens, targets: [B,T], ids in [0,V), on the host or the device. first: [B,T], the
// first position that each token sees (attention.hip), with options.document_mask alone; null: each sees all before it.
// end: likewise behind the last, where attention is not causal. With context parallelism all its ranks give the same sequences, of a
// T that 2 * ranks divides, of which each copies its own tokens.
void set_batch(Model& model, const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T,
               const int32_t* first = nullptr, const int32_t* end = nullptr);
// The head of the next calls computes predicted_rows of the batch alone, of which the last is padding. ids, on the host or the
// device, or null for all rows: find_predicted().
void set_predicted(Model& model, const int32_t* ids);
// The next calls use the batch and the activations of micro-batch k of ModelOptions::micro_batches.
void use_micro_batch(Model& model, int64_t k);
// The loss's scale and its counts, as checkpoints hold them; none without a scale.
std::vector<NamedTensor> loss_scale_tensors(const Model& model);
// Sets model.dloss for the passes that follow. allocate() sets it to 1 / N, of the mean loss of the largest batch.
void set_dloss(Model& model, const float* dloss);
// The rows of the batch, up to the final norm; their keys and values go to the cache.
void forward_cached(Model& model, const CachedRows& rows);
// activations.losses of the batch.
void forward(Model& model);
// The same, and the gradients of dloss * their sum. first, last: of the micro-batches of an optimizer step. The first writes
// the gradients, the others add to them; after the last they are sums over the ranks.
void forward_backward(Model& model, bool first, bool last = true);
// The two halves of it, each of a chunk of the layers that the model holds, for passes in the order of a pipeline. Without the
// first layer, forward_layers() reads activations.embedding and backward_layers() leaves its gradient in activations.dresidual;
// without the last, they leave the output of block layers.end - 1, and read its gradient from dresidual.
void forward_layers(Model& model, bool first, int64_t chunk = 0);
void backward_layers(Model& model, bool first, bool last, int64_t chunk = 0);

// The mean of losses [count] in host memory. Does not wait.
double mean(const float* losses, int64_t count);
// These wait.

// Mean cross-entropy of the batch.
double mean_loss(const Model& model);
// Logits [count,V] of rows of the last pass.
void logits_of_rows(Model& model, int64_t first, int64_t count, std::vector<float>& logits);
// Writes the argmax of each of the first `count` rows of the last pass to device memory [count] or [count,1], which may be
// the rows' own tokens; asynchronous.
void argmax_of_rows(Model& model, const Tensor& found);
// Logits [V] of the token that follows tokens [T], by a pass over all of them. With context parallelism all its ranks call it.
void next_logits(Model& model, const int32_t* tokens, int64_t T, std::vector<float>& logits);

}  // namespace llamac
