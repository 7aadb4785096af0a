// The shape of a Llama or Mistral model, from Hugging Face's config.json. All derived sizes are computed here and
// nowhere else.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace llamac {

constexpr int32_t ignore_index = -100;  // a target that does not count, as in PyTorch

// Llama 3.1's stretching of the rotary frequencies; factor 1: none.
struct RopeScaling {
    double factor = 1, low_freq_factor = 1, high_freq_factor = 4;
    int64_t original_context = 8192;  // in tokens
};

enum class ModelKind : uint8_t { llama, mistral };  // Mistral's is Llama's with a sliding window
enum class NormKind : uint8_t { rms };
enum class ActivationKind : uint8_t { silu };
enum class PositionKind : uint8_t { rope };

struct Config {
    int64_t V, C, F, L, NH, NKV, HD;  // core/tensor.h says what the letters mean
    int64_t max_context = 2048;       // max_position_embeddings: the longest sequence the model is meant for
    double eps = 1e-6;
    double rope_theta = 10000;
    RopeScaling rope_scaling;
    // What the architecture is made of. load_config accepts what is computed: Llama's and Mistral's.
    ModelKind kind = ModelKind::llama;
    NormKind norm = NormKind::rms;
    ActivationKind activation = ActivationKind::silu;  // of the gate
    PositionKind positions = PositionKind::rope;
    bool qkv_bias = false, output_bias = false, mlp_bias = false;
    bool qk_norm = false;  // of each head's queries and keys, before RoPE
    int64_t window = 0;    // the last tokens that attention sees, its own among them; 0: all
    bool tied = false;     // the LM head's matrix is the embedding's
    double initializer_range = 0.02;
    // transformers', where config.json has none. -1, {}: null there.
    int64_t bos = 1;
    std::vector<int64_t> eos = {2};
    std::optional<int64_t> pad;  // carried along where config.json has it, as it is

    int64_t q_size() const { return NH * HD; }
    int64_t kv_size() const { return NKV * HD; }
    int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
};

// model: a preset's NAME (configs/models/NAME.json), a folder with a config.json, or a .json file.
// Throws Error naming the file, the field, what was expected and what was found.
Config load_config(const std::string& model);
// The text of a config.json that transformers reads back to the same model.
std::string config_json(const Config& config, DType dtype);

}  // namespace llamac
