// The table of parameters: it drives allocation, initialisation, files, optimizer groups and the memory
// report.
#pragma once
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/safetensors.h"
#include "model/config.h"

namespace llamac {

struct Precision {
    DType weights = DType::f32;  // and activations
    DType gradients = DType::f32;
    DType moments = DType::f32;
    // fp32 master weights beside bf16 weights; without them bf16 weights are rounded stochastically.
    bool master = true;

    bool keeps_master() const { return master && weights == DType::bf16; }
};

struct Parameter {
    std::string name;            // Hugging Face's
    std::vector<int64_t> shape;  // [out,in] or [C]
    int64_t offset;              // in elements, into every buffer that holds one element a parameter
    int64_t elements;

    bool is_matrix() const { return shape.size() == 2; }
};

struct Parameters {
    std::vector<Parameter> table;             // the order of the files, and of the random streams (4k)
    Tensor weights, gradients, master, m, v;  // [elements]; master has no data where it is not kept
    size_t head;                              // index of the matrix that makes the logits

    // Parameter k in a buffer of [elements]; with count > 1, as many tensors that lie together as one matrix
    // (q/k/v, gate/up).
    Tensor view(const Tensor& buffer, size_t k, size_t count = 1) const;
    Tensor weight(size_t k, size_t count = 1) const { return view(weights, k, count); }
    Tensor gradient(size_t k, size_t count = 1) const { return view(gradients, k, count); }
};

// Indices into Parameters::table.
struct BlockParameters {
    size_t input_norm, qkv, o, post_norm, gate_up, down;
};
constexpr size_t embedding_parameter = 0;
BlockParameters block_parameters(int64_t layer);
size_t final_norm_parameter(const Config& config);

// Fills the table and plans its buffers.
void plan_parameters(Parameters& p, const Config& config, const Precision& precision, Arena& arena);
// As transformers initialises a Llama: matrices normal(0, initializer_range), norms 1. Moments and gradients
// are zeroed.
void initialize(Parameters& p, const Config& config, uint64_t seed);
// Weights from Hugging Face's files, converted to the weights' type. Throws Error naming the tensor and the
// file.
void load_weights(Parameters& p, const std::string& directory);

// What a checkpoint's two files hold.
std::vector<NamedTensor> weight_tensors(const Parameters& p);
std::vector<NamedTensor> optimizer_tensors(const Parameters& p);

}  // namespace llamac
