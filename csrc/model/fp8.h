// Tensors of linears as codes of fp8 (core/fp8.h, docs/fp8.md): their scales, their quantisation, and its counters.
//
// An input x, a weight and the gradient of an output have one scale each, a slot of Fp8State, or one scale per row. Each
// is quantised once, for all of its products: products that sum along the rows read the rows, and the others read the
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

// The codes of weights: quantised for each product, or kept, in both orientations.
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

// A matrix of weights as codes: [K,C] and [C,K].
struct StoredCodes {
    Tensor rows, transposed;
};

// 1 / scale of a slot's tensor with scales per row: of the codes' rows, and of the transposed codes' rows.
struct RowInverses {
    Tensor rows, transposed;
};

// Of each slot: the scale, 1 / scale, and, in fp8 blocks where scales are per row, the inverses.
struct Fp8Scales {
    Tensor scale, inverse;
    std::vector<RowInverses> inverses;
};

// The scales of all slots, and what quantisation works in.
struct Fp8State : Fp8Scales {
    Fp8Options options;
    Fp8Blocks blocks;
    int64_t slots = 0;
    // Of each slot. amax: since the last update; one more behind the last is of the tensor at hand. largest: of the last
    // update, of tensors divided by `unit`, the loss's scale for gradients; 0: nothing was measured; -1: not in fp8. nothing:
    // an amax of 0, with which scales are made of `largest` alone.
    Tensor amax, limit, largest, unit, nothing;
    // Scales that are not known before a tensor is are of one micro-batch: those of the inputs of the others in flight.
    std::vector<Fp8Scales> waiting;
    Tensor saturated;                 // values beyond the largest, since clear_saturated()
    Tensor rows, transposed, weight;  // of the tensor at hand; the transposed of an output's gradient
    std::vector<StoredCodes> stored;  // of all layers, where weights' codes are kept
    // Of the head, whose rows come in chunks, each a tensor of its own: the codes of its weight; of a chunk of logits'
    // gradients, and, transposed, of the chunk's inputs.
    StoredCodes head, dlogits;
    Tensor head_inputs;
    std::vector<bool> measured;  // delayed: of each slot in fp8, whether an optimizer step has set its scale
    float loss_scale = 1;        // of the step, as `unit` has it
    bool measures = false;       // whether quantisation takes part in the next update and in the count
    bool makes_weights = false;  // stored: whether a forward pass quantises them
    bool makes_head = false;     // whether the next chunk of the head quantises its weight
    // Stored, delayed, and all weights updated by this rank: AdamW writes their codes. current: it has written those of the
    // weights as they are.
    bool by_optimizer = false, current = false;
};

// A block's slots: the input and the weight of each linear in turn, then the gradients of their outputs. Those of the head
// follow the last block's.
std::string slot_name(const Config& config, int64_t slot);
// Elements of a slot's tensor in a batch of N rows.
int64_t slot_elements(const Parameters& parameters, int64_t slot, int64_t N);

// Plans the state for batches of N rows. Throws Error where the model has no such blocks.
void plan_fp8(Fp8State& state, const Fp8Options& options, const Config& config, const Parameters& parameters,
              int64_t N, int64_t micro_batches, Arena& arena);
// What the head in fp8 works in, with chunks of so many rows.
void plan_fp8_head(Fp8State& state, const Config& config, int64_t chunk, Arena& arena);
// Scales of 1, or those of a checkpoint; limits; nothing measured.
void reset_fp8(Fp8State& state, const Config& config);
// A pass begins. Whether what is quantised counts: in training. Whether it is the first since the weights have changed.
void begin_fp8_pass(Model& model, bool measures, bool first);
// While parts of a block are computed again: nothing counts, and weights are as they are.
void pause_fp8(Model& model, bool on);
// Counts of saturated values begin anew; and, as they are then, go to host memory, [slots]. In the model's stream.
void clear_saturated(Model& model);
void copy_saturated(Model& model, int32_t* counts);
// Whether passes will go on to launch what the next one launches, so that it can be captured.
bool is_settled(const Model& model);
// What a checkpoint of the optimizer holds beside AdamW's state: with delayed scaling, the scales and the largest values
// that they are of, the same on all ranks.
std::vector<NamedTensor> fp8_tensors(const Model& model);
// Takes them from a checkpoint that an optimizer step has written, if it has them. The next step's scales are of the types of
// this run; a tensor that was not in fp8 is measured first. saved: of the run that wrote it, for files of version 0.1, which lack
// the largest values. Throws Error where it is of another model.
void load_fp8(Model& model, const std::string& path, const Fp8Options& saved);
// A step begins whose gradients are those of the mean loss times this number: their scales follow it.
void follow_loss_scale(Model& model, double scale);
// Delayed: the scales of the next step, from what all ranks have measured. Part of the optimizer step, before the weights
// change: their codes are of the next step.
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
// dout [N,out]. Its codes stay until those of the next gradient.
Quantizable output_gradient(const Model& model, const Linear& linear, const Tensor& dout);
// Memory for the transposed codes of so many rows of the head's input; no data where its products are not in fp8.
Tensor head_input_codes(const Model& model, int64_t rows);

// What quantisation writes, as operations take it, and the scale. Outputs without data are not wanted.
struct Fp8Codes {
    Tensor out, transposed, amax, saturated, scale;
};
// The codes of a parameter that AdamW quantises: those of its rows, and columns of the transposed codes of its matrix. None
// where AdamW does not quantise it.
std::optional<Fp8Codes> updated_codes(const Model& model, const Parameter& parameter);
// Whether the scales of a block are known before its tensors, so that operations that compute these can write codes alone.
bool computes_codes(const Model& model, int64_t block);
// What such an operation writes. again: the tensor has been quantised in this pass.
Fp8Codes codes_of(const Model& model, const Quantizable& x, bool again);
// Writes the codes of x from its values. Nothing where its products are in the storage type.
void quantize(Model& model, const Quantizable& x, bool again);
// The codes of a weight, quantised where they are not kept: [out,in] for the forward product; transposed, for the backward.
Tensor weight_codes(Model& model, const Quantizable& weight, bool transposed);
// 1 / scale of codes, as products take it.
Tensor inverse_of(const Model& model, const Quantizable& x, const Tensor& codes, bool transposed);

}  // namespace llamac
