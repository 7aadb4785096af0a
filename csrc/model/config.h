// The shape of a Llama model, read from Hugging Face's config.json. Every derived size lives here and nowhere
// else.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace llamac {

// Llama 3.1's stretching of the rotary frequencies; factor 1: none.
struct RopeScaling {
    double factor = 1, low_freq_factor = 1, high_freq_factor = 4;
    int64_t original_context = 8192;  // in tokens
};

struct Config {
    int64_t V, C, F, L, NH, NKV, HD;  // core/tensor.h says what the letters mean
    int64_t max_context = 2048;       // max_position_embeddings: the longest sequence the model is meant for
    double eps = 1e-6;
    double rope_theta = 10000;
    RopeScaling rope_scaling;
    bool tied = false;  // the LM head's matrix is the embedding's
    double initializer_range = 0.02;
    // transformers', where config.json has none. -1, {}: null there.
    int64_t bos = 1;
    std::vector<int64_t> eos = {2};
    std::optional<int64_t> pad;  // carried along where config.json has it, as it is

    int64_t q_size() const { return NH * HD; }
    int64_t kv_size() const { return NKV * HD; }
    int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
    int64_t parameters() const;  // elements of all separate tensors
    int64_t matmul_parameters()
        const;  // of the matrices that take part in a product: not an untied input embedding
    double flops_per_token(
        int64_t T) const;  // forward and backward, causal attention: 6*matmul_parameters + 6*L*NH*HD*T
};

// model: a preset's NAME (configs/models/NAME.json), a folder with a config.json, or a .json file.
// Throws Error naming the file, the field, what was expected and what was found.
Config load_config(const std::string& model);
// The text of a config.json that transformers reads back to the same model.
std::string config_json(const Config& config, DType dtype);

}  // namespace llamac
