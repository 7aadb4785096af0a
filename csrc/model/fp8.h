// Tensors of linears as codes of fp8 (core/fp8.h, docs/fp8.md): their scales, their quantization, and its counters.
//
// An input x, a weight and the gradient of an output have one scale each, a slot of Fp8State, or one scale per row. Each
// is quantized once, for all of its products: products that sum along the rows read the rows, and the others read the
// transposed rows. With delayed scaling, the operation that computes a tensor writes its codes itself if it can.
#pragma once
#include <optional>

#include "core/arena.h"
#include "core/safetensors.h"
#include "core/tensor.h"
#include "model/config.h"
#include "model/parameters.h"

namespace llamac {

struct LinearRow;
struct Model;

// Where scales come from: one of a tensor from its own largest value, or from that of the optimizer step before; or one per
// row from the row's largest value, and one per column for the transposed codes.
enum class Fp8Scaling : uint8_t { current, delayed, row };

// The codes of weights: quantized for each product, or kept, in both orientations.
enum class Fp8Weights : uint8_t { recomputed, stored };

struct Fp8Options {
    Fp8Scaling scaling = Fp8Scaling::delayed;
    Fp8Weights weights = Fp8Weights::recomputed;
    DType values = DType::e4m3;             // of inputs and weights
    DType gradients = DType::e5m2;          // of outputs' gradients
    int64_t keep_first = 0, keep_last = 0;  // blocks whose products stay in the storage type
    bool head = false;                      // whether the head's products are in fp8
};
constexpr int64_t fp8_multiple = 16;  // of the sizes that products in fp8 take on a device

// The blocks whose products are in fp8, and the type of their inputs' codes.
struct Fp8Blocks {
    int64_t first = 0, end = 0;
    DType codes = DType::e4m3;

    bool has(int64_t block) const { return block >= first && block < end; }
};

// Of a matrix and of its transpose: codes [K,C] and [C,K], or 1 / scale of each row of codes.
struct BothOrientations {
    Tensor rows, transposed;
};

// Per slot: the scale, 1 / scale, and, in fp8 blocks with scales per row, the inverses.
struct Fp8Scales {
    Tensor scale, inverse;
    std::vector<BothOrientations> inverses;
};

// The scales of all slots, and the memory of quantization.
struct Fp8State : Fp8Scales {
    Fp8Options options;
    Fp8Blocks blocks;
    int64_t slots = 0;
    // One element per slot. amax: since the last update; one more element for the current tensor. largest: amax / unit at the last
    // update (0: not measured; -1: not in fp8). unit: the loss's scale for gradients. nothing: zeros, an amax that keeps `largest`.
    Tensor amax, limit, largest, unit, nothing;
    // The scales of inputs of the other micro-batches in flight, where a scale is known only after its tensor.
    std::vector<Fp8Scales> waiting;
    Tensor saturated;                      // values beyond the largest, since clear_saturated()
    Tensor rows, transposed, weight;       // of the tensor at hand; the transposed of an output's gradient
    std::vector<BothOrientations> stored;  // of all layers, where weights' codes are kept
    // The head processes its rows in chunks: the codes of its weight, of a chunk of logits' gradients, and, transposed, of the
    // chunk's inputs.
    BothOrientations head, dlogits;
    Tensor head_inputs;
    std::vector<bool> measured;  // delayed: of each slot in fp8, whether an optimizer step has set its scale
    float loss_scale = 1;        // of the step, as `unit` has it
    bool measures = false;       // whether quantization takes part in the next update and in the count
    bool makes_weights = false;  // stored: whether a forward pass quantizes them
    bool makes_head = false;     // whether the next chunk of the head quantizes its weight
    // by_optimizer: AdamW writes the codes of weights (stored, delayed, and all weights whole and updated by this rank). current:
    // these codes are of the current weights.
    bool by_optimizer = false, current = false;
};

// A block's slots: the input and the weight of each linear in turn, then the gradients of their outputs. Those of the head
// follow the last block's.
std::string slot_name(const Config& config, int64_t slot);
// Elements of a slot's tensor in a batch of N rows.
int64_t slot_elements(const Config& config, const Parameters& parameters, int64_t slot, int64_t N);

// Plans the state for batches of N rows. Throws Error where the model has no such blocks.
void plan_fp8(Fp8State& state, const Fp8Options& options, const Config& config, const Parameters& parameters,
              int64_t N, int64_t micro_batches, Arena& arena);
// Plans the memory of a head in fp8 with chunks of `chunk` rows.
void plan_fp8_head(Fp8State& state, const Config& config, int64_t chunk, Arena& arena);
// Sets all scales to 1, the limits, and no measurement.
void reset_fp8(Fp8State& state, const Config& config);
// Begins a pass. measures: whether quantization updates amax and the counters (training). first: the first pass since the weights
// changed.
void begin_fp8_pass(Model& model, bool measures, bool first);
// During recomputation: quantization measures nothing, and the codes of weights are valid.
void pause_fp8(Model& model, bool on);
// Clears the counts of saturated values, or copies them to host memory [slots], in the model's stream.
void clear_saturated(Model& model);
void copy_saturated(Model& model, int32_t* counts);
// Whether all further passes launch the same kernels, so that a pass can be captured.
bool is_settled(const Model& model);
// The fp8 part of the optimizer's checkpoint: with delayed scaling, the scales and the amax that they were computed from. The
// same on all ranks.
std::vector<NamedTensor> fp8_tensors(const Model& model);
// Loads fp8 scales if the checkpoint has them; the file must be written after an optimizer step. The next step's scales fit the
// types of this run; a tensor that was not in fp8 is measured first. saved: the options of the run that wrote the file, for files of
// version 0.1, which lack amax. Throws Error if the file is another model's.
void load_fp8(Model& model, const std::string& path, const Fp8Options& saved);
// Begins a step whose gradients are multiplied by `scale`; the scales of gradients follow it.
void follow_loss_scale(Model& model, double scale);
// Delayed scaling: computes the scales of the next step from the amax of all ranks. Part of the optimizer step, before the weights
// change, because their codes belong to the next step.
void update_fp8_scales(Model& model);

// AdamW has updated all weights.
void finish_fp8_update(Model& model);

// One linear of a block; the head, with no row, is of the block behind the last one.
struct Linear {
    int64_t block;
    const LinearRow* row = nullptr;
};
// A tensor that enters products: its values and, where its products are in fp8, memory for its codes.
struct Quantizable {
    Tensor values;
    int64_t slot = -1;  // of its scale; -1: its products are in the storage type
    // Without data: no product reads these codes, or, of a weight, each product makes them.
    Tensor rows = {}, transposed = {};

    bool in_fp8() const { return slot >= 0; }
};
// x [N,in]. transposed: memory for the transposed codes, which the weight's gradient reads, or none.
Quantizable linear_input(const Model& model, const Linear& linear, const Tensor& x, const Tensor& transposed);
Quantizable linear_weight(const Model& model, const Linear& linear);
// dout [N,out]. Its codes are valid until the next gradient is quantized.
Quantizable output_gradient(const Model& model, const Linear& linear, const Tensor& dout);
// Memory for the transposed codes of `rows` rows of the head's input; no data if its products are not in fp8.
Tensor head_input_codes(const Model& model, int64_t rows);

// Outputs of quantization, none without data, and the scale.
struct Fp8Codes {
    Tensor out, transposed, amax, saturated, scale;
};
// Where AdamW writes the codes of a parameter: rows, and columns of the transposed codes of its matrix. None if AdamW does not
// quantize it.
std::optional<Fp8Codes> updated_codes(const Model& model, const Parameter& parameter);
// Whether the scales of a block are known before its tensors, so that operations that compute these can write codes alone.
bool computes_codes(const Model& model, int64_t block);
// Outputs of such an operation. again: the tensor was quantized before in this pass.
Fp8Codes codes_of(const Model& model, const Quantizable& x, bool again);
// Writes the codes of x from its values. Nothing where its products are in the storage type.
void quantize(Model& model, const Quantizable& x, bool again);
// The codes of a weight, quantized where they are not kept: [out,in] for the forward product; transposed, for the backward.
Tensor weight_codes(Model& model, const Quantizable& weight, bool transposed);
// 1 / scale of codes, as products take it.
Tensor inverse_of(const Model& model, const Quantizable& x, const Tensor& codes, bool transposed);

}  // namespace llamac
