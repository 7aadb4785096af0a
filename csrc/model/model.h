// Llama: forward, backward, update. docs/walk.md walks through one step.
#pragma once
#include <functional>

#include "core/registry.h"
#include "model/activations.h"
#include "model/config.h"
#include "model/parameters.h"

namespace llamac {

struct ModelOptions {
    int64_t batch_size = 1, seq_len = 1;  // the largest batch that a step will see
    Precision precision;
    Recompute recompute;
    // The logits are made, used and overwritten in chunks of rows of at most this size: big enough for an
    // efficient matrix product, small beside everything else.
    int64_t logits_bytes = 64 << 20;
    bool training = true;  // false: no gradients, no optimizer state
};

struct AdamW {
    double lr, beta1, beta2, eps, weight_decay, grad_clip;
};

struct Model {
    Model(const Config& config, const ModelOptions& options);
    Model(const Model&) = delete;

    const Config config;
    const ModelOptions options;
    const Queue queue;
    Arena arena;
    Parameters parameters;
    Activations activations;
    Tensor grad_norm, lr, step;  // [1] each: read by the optimizer where the weights are
    // Where set, sees every activation and gradient, by its name in the debug state, while it holds its
    // value.
    std::function<void(const std::string& name, const Tensor& value)> tap;
};

// tokens, targets: [B,T], ids in [0,V). Returns the mean cross-entropy.
double forward(Model& model, const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T);
// The same, and the gradients of loss * scale, where loss is the mean over this batch. first: gradients are
// written, otherwise added to. Returns the (unscaled) mean cross-entropy.
double forward_backward(Model& model, const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T,
                        bool first, double scale);
// One AdamW update, step = 1, 2, …; returns the gradient's norm before clipping.
double update(Model& model, const AdamW& adamw, int64_t step, uint64_t seed);
// Logits [V] of the token that follows tokens [T].
void next_logits(Model& model, const int32_t* tokens, int64_t T, std::vector<float>& logits);

}  // namespace llamac
