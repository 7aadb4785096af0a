// The transformer block as data: its linears in the order of the forward pass. Forward computes the rows in order and
// backward in reverse order (block.cpp). Recomputation, fp8 scales, memory and the debug state follow from the same rows.
#pragma once
#include <array>

#include "model/activations.h"
#include "model/parameters.h"

namespace llamac {

struct Model;
struct CachedRows;

// The operation that computes the input of a linear. attention includes RoPE of the linear before it.
enum class Producer : uint8_t { norm, attention, activation };

// Whether the backward of the operation can rewrite the operation's output from its own operands.
constexpr bool rewritten_by_backward(Producer producer) {
    return producer != Producer::attention;
}

// out = x · weightᵀ (+ residual) (+ bias)
struct LinearRow {
    const char* name;  // of the weight and of the output's gradient among the fp8 scales
    Producer input;    // computes x
    FlatParam BlockParameters::*weight, BlockParameters::*bias;  // of models that have one
    Adapter BlockParameters::* adapter;                          // likewise
    Tensor BlockActivations::*x, BlockActivations::*x_codes, BlockActivations::*out;
    Tensor Activations::*dx, Activations::*dout;
    bool adds_residual;
    Split split;
    // Kept for the producer's backward: rstd of a norm, lse of attention.
    Tensor BlockActivations::* statistics = nullptr;
    // The input of a norm, or the residual that is added; null: the block's input. With Config::post_norm the residual is the
    // output of the norm, which is the x of the row before.
    Tensor BlockActivations::* residual = nullptr;
    // Of a norm: its weight, and a LayerNorm's bias and means.
    FlatParam BlockParameters::*norm = nullptr, BlockParameters::*norm_bias = nullptr;
    Tensor BlockActivations::* mean = nullptr;
    // What is computed with out and lives as long. With Config::output_norm, the first of a linear that adds the residual is its
    // product, whose norm, that of the row before, is added.
    std::array<Tensor BlockActivations::*, 3> derived = {};
};

inline constexpr std::array<LinearRow, 4> block_linears = [] {
    using P = BlockParameters;
    using A = BlockActivations;
    using D = Activations;
    return std::array<LinearRow, 4>{{{.name = "qkv",
                                      .input = Producer::norm,
                                      .weight = &P::qkv,
                                      .bias = &P::qkv_bias,
                                      .adapter = &P::qkv_adapter,
                                      .x = &A::input_norm,
                                      .x_codes = &A::input_norm_codes,
                                      .out = &A::qkv,
                                      .dx = &D::dnorm,
                                      .dout = &D::dqkv,
                                      .adds_residual = false,
                                      .split = Split::outputs,
                                      .statistics = &A::input_rstd,
                                      .norm = &P::input_norm,
                                      .norm_bias = &P::input_norm_bias,
                                      .mean = &A::input_mean,
                                      .derived = {&A::qk, &A::q_rstd, &A::k_rstd}},
                                     {.name = "o",
                                      .input = Producer::attention,
                                      .weight = &P::o,
                                      .bias = &P::o_bias,
                                      .adapter = &P::o_adapter,
                                      .x = &A::attention,
                                      .x_codes = &A::attention_codes,
                                      .out = &A::residual_mid,
                                      .dx = &D::dattention,
                                      .dout = &D::dresidual,
                                      .adds_residual = true,
                                      .split = Split::inputs,
                                      .statistics = &A::lse,
                                      .derived = {&A::attention_out}},
                                     {.name = "gate_up",
                                      .input = Producer::norm,
                                      .weight = &P::gate_up,
                                      .bias = &P::gate_up_bias,
                                      .adapter = &P::gate_up_adapter,
                                      .x = &A::post_norm,
                                      .x_codes = &A::post_norm_codes,
                                      .out = &A::gate_up,
                                      .dx = &D::dnorm,
                                      .dout = &D::dgate_up,
                                      .adds_residual = false,
                                      .split = Split::outputs,
                                      .statistics = &A::post_rstd,
                                      .residual = &A::residual_mid,
                                      .norm = &P::post_norm,
                                      .norm_bias = &P::post_norm_bias,
                                      .mean = &A::post_mean},
                                     {.name = "down",
                                      .input = Producer::activation,
                                      .weight = &P::down,
                                      .bias = &P::down_bias,
                                      .adapter = &P::down_adapter,
                                      .x = &A::swiglu,
                                      .x_codes = &A::swiglu_codes,
                                      .out = &A::residual_out,
                                      .dx = &D::dswiglu,
                                      .dout = &D::dresidual,
                                      .adds_residual = true,
                                      .split = Split::inputs,
                                      .residual = &A::residual_mid,
                                      .derived = {&A::mlp_out}}}};
}();
inline int64_t index_of(const LinearRow& row) {
    return &row - block_linears.data();
}

// Whether the producer of the next row's input reads this row's output.
constexpr bool feeds(const LinearRow& row, Producer producer) {
    return &row != &block_linears.back() && !row.adds_residual && (&row + 1)->input == producer;
}

// The parts of a row that the backward pass computes again.
struct Recomputed {
    bool input = false, output = false;

    // The input alone is made again, without the product that reads it.
    bool input_alone() const { return input && !output; }
};
// in_fp8: the layer's products. There the qkv product needs its input's codes.
Recomputed recomputed(const Recompute& recompute, const LinearRow& row, int64_t layer, bool in_fp8);
// The row that reads an activation; null: none.
const LinearRow* reader_of(Tensor BlockActivations::* activation);
// Its name in the debug state and among the fp8 scales.
const char* name_of(const Config& config, Tensor BlockActivations::* activation);
// Whether the backward pass computes an activation again.
bool is_recomputed(const Recompute& recompute, Tensor BlockActivations::* activation, int64_t layer,
                   bool in_fp8);

// A run of a block's forward: all of it, or the recomputed part.
enum class Run : uint8_t { inference, training, recomputation };
// cached: the rows continue sequences whose keys and values are kept.
void forward_block(Model& model, int64_t layer, Run run, const CachedRows* cached = nullptr);
// dresidual enters as the gradient of the block's output and leaves as that of its input.
void backward_block(Model& model, int64_t layer, bool accumulate);
// The input of block `layer`, which is the output of the one before, of a model with these chunks of layers.
const Tensor& block_input(const Activations& activations, const std::vector<LayerRange>& chunks,
                          int64_t layer);
Tensor block_input(const Model& model, int64_t layer);

// A norm: its input [N,C], the statistics that its backward reads [N], its weight and bias. RMSNorm has no mean and no bias.
struct Norm {
    Tensor x, rstd, mean;
    const FlatParam &weight, &bias;
};
void norm_forward(Model& model, const Tensor& out, const Norm& norm);
// gradient becomes that of the norm's input; with `adds`, that is added to it. out: with data, receives the
// norm's output again.
void norm_backward(Model& model, const Tensor& gradient, const Norm& norm, const Tensor& dout, bool adds,
                   const Tensor& out, bool accumulate);

// Which GELU the model has.
bool has_tanh(const Model& model);

// Calls the model's hook with a gradient, or with all activations, of a block.
void show_gradient(const Model& model, int64_t layer, Tensor BlockActivations::* of, const Tensor& value);
void show_block(const Model& model, int64_t layer);

}  // namespace llamac
