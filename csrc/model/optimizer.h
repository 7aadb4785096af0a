// The optimizer step of a model: gradient norm and AdamW, on the model's stream (model.h), over the shards that a
// rank holds.
#pragma once
#include "model/model.h"

namespace llamac {

struct AdamW {
    double beta1, beta2, eps, weight_decay, grad_clip;
};

// Sets model.lr and model.step; step = 1, 2, ...
void set_step(Model& model, const float* lr, const int32_t* step);
// model.squares, the sum over all gradients before clipping, and one AdamW step. Ranks end with the same weights.
void optimizer_step(Model& model, const AdamW& adamw, uint64_t seed);

// The outputs of AdamW for a parameter, [count] each; weight and master have no data if they are not kept.
struct OptimizerState {
    Tensor weight, master, m, v;
};
// Elements first .. first+count of a parameter, whose moments this rank must hold.
OptimizerState optimizer_state(const Parameters& p, const Parameter& parameter, int64_t first, int64_t count);
// model.squares as above.
void sum_squares(Model& model);
// Whether the backward pass of the last micro-batch computes model.squares, beside the last reductions: data-parallel ranks without
// stages. Otherwise optimizer_step() does.
bool sums_squares_in_backward(const Model& model);
// AdamW on the elements of a parameter from `first` on that lie in `state`; reads their gradients and model.squares.
void update(Model& model, const Parameter& parameter, int64_t first, const OptimizerState& state,
            const AdamW& adamw, uint64_t seed);

// The norm of the gradients, as AdamW rounds it, from the sum of their squares; scale: of the loss.
double grad_norm(double squares, double scale = 1);

}  // namespace llamac
