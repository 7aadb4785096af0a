// Low-rank adapters beside frozen linears (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021):
//
//   out = x · weightᵀ + scale · (x · Aᵀ) · Bᵀ,   A [rank,in], B [out,rank], scale = alpha / rank
//
// A fused linear has an A and a B per target of it (parameters.h). The As are one matrix [width, in]: targets·rank rows, and
// zeros up to a multiple of 8. The Bs are copied, times the scale, into a block-diagonal matrix [width, out] before they enter a
// product, so that the adapters of a linear take as many products as those of one target.
//
// A product of rank 16 costs the memory of its output, which it reads and writes. Where that is largest, the product with the
// weight sums over the rank, too:
//
//   gate_up:   out = [x | low] · [weight | scale·B]ᵀ,   [dx | dlow] = dout · [weight | scale·B],   then dx += dlow · A
//   down:      dx = [dout | dlow] · [weight ; A]
#pragma once
#include <array>
#include <vector>

#include "model/block.h"

namespace llamac {

struct LoraState {
    std::vector<LoraTarget> targets;
    // By the rows of block_linears: scale · Bᵀ of the layer at hand, [width, out], with zeros beside its blocks; or scale · B,
    // [out, spare columns of the weight].
    std::array<Tensor, block_linears.size()> b;
    // Likewise: [x | low] or [dout | dlow], with zeros up to the weight's spare columns or rows. No data: neither is multiplied.
    std::array<Tensor, block_linears.size()> joined;
    Tensor joined_dx;         // the largest [dx | dlow]
    std::vector<Tensor> low;  // x · Aᵀ [N, width], by micro-batch, layer and row
    Tensor dlow;              // the gradient of one of them
    Tensor db;                // of one of `b`, beside its blocks, too
    Tensor base;              // f64 [4]: the hashes of the frozen weights, and of their codes
};

// Throws Error if the model has not the targets' linears.
void check_lora(const Config& config, const Lora& lora);
void plan_lora(LoraState& state, const Config& config, const Parameters& parameters,
               const ModelOptions& options, Arena& arena);
void reset_lora(const LoraState& state);
// Hashes the frozen weights, by which a resumed run knows its base. With tensor parallelism each rank has other weights, and the
// hash is zeros.
void hash_base(Model& model);

bool has_adapter(const Model& model, const LinearRow& row);
// linear_forward() of a linear with adapters. again: x · Aᵀ is kept.
void lora_forward(Model& model, int64_t layer, const LinearRow& row, const Tensor& out, const Tensor& x,
                  const Tensor& weight, const Tensor& residual, const Tensor& bias, bool again);
// The same of linear_backward_input(). dx may have no data. Precedes the next call, of the same linear.
void lora_backward_input(Model& model, int64_t layer, const LinearRow& row, const Tensor& dx,
                         const Tensor& dout, const Tensor& weight);
// The gradients of A and B.
void lora_backward_weight(Model& model, int64_t layer, const LinearRow& row, const Tensor& dout,
                          const Tensor& x, bool accumulate);

}  // namespace llamac
