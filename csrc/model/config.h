// The shape of a model, as Hugging Face's config.json describes it. All derived sizes are computed here.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "model/mesh.h"

namespace llamac {

constexpr int32_t ignore_index = -100;  // a target that does not count, as in PyTorch

enum class RopeKind : uint8_t { plain, linear, llama3, yarn, longrope };

// Scaling of rotary frequencies for contexts that are longer than those of the first training.
struct RopeScaling {
    RopeKind kind = RopeKind::plain;
    double factor = 1;
    // In turns within the original context: pairs that turn less are slowed down by the factor, those that turn more stay.
    double low = 1,
           high = 4;  // Llama 3's low_freq_factor and high_freq_factor, YaRN's beta_slow and beta_fast
    int64_t original_context = 0;  // in tokens
    double attention_factor = 1;   // of cosines and sines: YaRN's and LongRoPE's
    bool truncate = true;          // YaRN's bounds are whole pairs
    // LongRoPE's divisors of each pair's frequency: within the original context, and beyond it.
    std::vector<double> short_factor = {}, long_factor = {};
};

enum class NormKind : uint8_t { rms, layer };
enum class ActivationKind : uint8_t { silu, gelu, gelu_tanh };
enum class PositionKind : uint8_t { rope, learned };

struct Config {
    int64_t V, C, F, L, NH, NKV, HD;  // dimension letters: core/tensor.h
    int64_t max_context = 2048;       // max_position_embeddings: the longest sequence the model is meant for
    double eps = 1e-6;
    double rope_theta = 10000;
    RopeScaling rope_scaling;
    std::string model_type = "llama";  // of config.json (checkpoint/config_json.cpp has the table)
    // The architecture. load_config accepts the values that the model computes.
    NormKind norm = NormKind::rms;
    ActivationKind activation = ActivationKind::silu;  // silu has a gate, gelu has none
    PositionKind positions = PositionKind::rope;
    bool qkv_bias = false, output_bias = false, mlp_bias = false;
    bool causal = true;       // a token sees no later ones
    bool post_norm = false;   // norms of sums, which are the residuals (block.h); with a head like BERT's
    int64_t token_types = 0;  // rows of the table of token types; 0: there is none
    bool has_pooler = false, has_next_sentence = false;  // BERT's, which files carry and nothing computes
    bool output_norm =
        false;  // norms of the outputs of attention and of the feed-forward part, which are then added
    bool qk_norm = false;           // of each head's queries and keys, or of all heads together, before RoPE
    bool joint_qk_norm = false;     // with qk_norm: of the queries, and of the keys, of all heads together
    double rotary_factor = 1;       // of the channels of a head: RoPE turns the first of them
    bool is_fused = false;          // files have q, k and v as one tensor, and gate and up as one
    int64_t window = 0;             // the last tokens that attention sees, its own among them; 0: all
    std::vector<bool> slides = {};  // by layer: whether its attention has the window; empty: all layers
    bool has_dropout = false;       // of config.json, which is not applied
    // With tensor parallelism: rows of this rank's tables of tokens, and the ranks among which rows of the residual stream are
    // divided.
    int64_t vocabulary_rows = 0, row_ranks = 1;
    bool tied = false;  // the LM head's matrix is the embedding's
    double initializer_range = 0.02;
    // transformers', where config.json has none. -1, {}: null there.
    int64_t bos = 1;
    std::vector<int64_t> eos = {2};
    std::optional<int64_t> pad;  // carried along where config.json has it, as it is

    int64_t q_size() const { return NH * HD; }
    int64_t kv_size() const { return NKV * HD; }
    int64_t rotary_size() const { return static_cast<int64_t>(static_cast<double>(HD) * rotary_factor); }
    int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
    bool is_gpt2() const { return model_type == "gpt2"; }  // names of fields and parameters are GPT-2's
    bool is_bert() const { return model_type == "bert"; }  // likewise
    const char* max_context_field() const { return is_gpt2() ? "n_positions" : "max_position_embeddings"; }
    bool is_gated() const { return activation == ActivationKind::silu; }
    int64_t up_size() const { return is_gated() ? 2 * F : F; }
    // Rows of the embedding and of the head in memory, the last of them zeros: a multiple of what products and vectors need. Other
    // models have V: the place of an element in memory is part of its stochastic rounding, and earlier runs keep their bits.
    int64_t padded_V() const {
        return vocabulary_rows ? vocabulary_rows : is_gpt2() || is_bert() ? (V + 63) / 64 * 64 : V;
    }
    // Of N rows of the residual stream, those of each rank (model/tensor_parallel.h).
    int64_t stream_rows(int64_t N) const { return (N + row_ranks - 1) / row_ranks; }
    int64_t window_of(int64_t layer) const { return slides.empty() || slides[layer] ? window : 0; }
};

// Tokens per rank of a vocabulary that tensor parallelism divides; the last rank may have fewer.
inline int64_t tokens_per_rank(int64_t V, int64_t ranks) {
    return (V + ranks - 1) / ranks;
}
// The sizes of this rank where tensor parallelism divides the model. Throws Error if its ranks do not divide the model.
Config divide(const Config& config, const Axis& tensor);

// Radians per position of each pair of a head's channels, [rotary_size/2]; zeros where positions are learned. T: of the longest sequence.
std::vector<double> rope_frequencies(const Config& config, int64_t T);

}  // namespace llamac
