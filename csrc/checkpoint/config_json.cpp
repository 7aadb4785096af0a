#include "checkpoint/config_json.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>

#include "core/embedded.h"
#include "core/json.h"

namespace llamac {
namespace {

using json = nlohmann::json;
using namespace std::string_view_literals;
namespace fs = std::filesystem;

// So that bytes of tensors are numbers of 64 bits: no model is near.
constexpr int64_t max_width = int64_t{1} << 24, max_layers = int64_t{1} << 16,
                  max_parameters = int64_t{1} << 48;

// Whether an integer fits; JSON's reader takes them up to 2^64.
bool is_int64(const json& integer) {
    return !integer.is_number_unsigned() || integer.get<uint64_t>() <= INT64_MAX;
}

// The fields of one config.json, with the file's name for the messages.
struct ConfigFields {
    const std::string& file;
    const json& values;

    const json* find(const char* key) const {
        const auto it = values.find(key);
        return it == values.end() || it->is_null() ? nullptr : &*it;
    }
    [[noreturn]] void wrong(const char* key, const char* expected, const std::string& found) const {
        fail(file, ": ", key, ": expected ", expected, ", found ", found);
    }
    int64_t size(const char* key, int64_t max, int64_t min = 1) const {
        const json* v = find(key);
        const std::string expected = "an integer from " + std::to_string(min) + " to " + std::to_string(max);
        if (!v) wrong(key, expected.c_str(), "nothing");
        if (!v->is_number_integer() || *v < min || *v > max) wrong(key, expected.c_str(), excerpt(*v));
        return v->get<int64_t>();
    }
    int64_t size_or(const char* key, int64_t max, int64_t missing, int64_t min = 1) const {
        return find(key) ? size(key, max, min) : missing;
    }
    // The value for an absent field, or for null. absent: 0 if it is that for null.
    int64_t missing(const char* key, int64_t absent, int64_t null) const {
        return absent && !values.contains(key) ? absent : null;
    }
    double positive_or(const char* key, double missing) const {
        const json* v = find(key);
        if (!v) return missing;
        if (!v->is_number() || !(v->get<double>() > 0)) wrong(key, "a positive number", excerpt(*v));
        return v->get<double>();
    }
    double positive(const char* key) const {
        if (!find(key)) wrong(key, "a positive number", "nothing");
        return positive_or(key, 0);
    }
    // An option of YaRN; 0: not given.
    double option_or(const char* key, double missing) const {
        const json* v = find(key);
        if (!v || (v->is_number() && *v == 0)) return missing;
        if (!v->is_number() || *v < 1e-9 || *v > 1e9) wrong(key, "a number from 1e-9 to 1e9", excerpt(*v));
        return v->get<double>();
    }
    bool flag_or(const char* key, bool missing) const {
        const json* v = find(key);
        if (v && !v->is_boolean()) wrong(key, "true or false", excerpt(*v));
        return v ? v->get<bool>() : missing;
    }
    // LongRoPE's divisors of the frequencies.
    std::vector<double> divisors(const char* key, int64_t pairs) const {
        const json* v = find(key);
        const auto fits = [](const json& x) { return x.is_number() && x >= 1e-9 && x <= 1e9; };
        if (!v || !v->is_array() || static_cast<int64_t>(v->size()) != pairs ||
            !std::ranges::all_of(*v, fits))
            wrong(key,
                  ("a list, for the pairs of a head's channels, of " + std::to_string(pairs) +
                   " numbers from 1e-9 to 1e9")
                      .c_str(),
                  v ? excerpt(*v) : "nothing");
        return v->get<std::vector<double>>();
    }
    // Of the channels of a head, those that RoPE turns.
    double rotary_factor_or(double missing, int64_t HD, bool partial) const {
        const json* v = find("partial_rotary_factor");
        if (!v) return missing;
        const double factor = v->is_number() ? v->get<double>() : 0, size = static_cast<double>(HD) * factor;
        if (!partial && factor != 1)
            wrong("partial_rotary_factor", "1: all channels of a head are turned", excerpt(*v));
        if (!(factor <= 1 && size >= 2) || static_cast<int64_t>(size) % 2)
            wrong("partial_rotary_factor", "the part, up to 1, of a head's channels that is an even number",
                  excerpt(*v));
        return factor;
    }
    std::string text_or(const char* key, const char* missing) const {
        const json* v = find(key);
        if (v && !v->is_string()) wrong(key, "a string", excerpt(*v));
        return v ? v->get<std::string>() : missing;
    }
    // The index of the word; 0 where there is none.
    size_t choice(const char* key, std::span<const char* const> words) const {
        const std::string found = text_or(key, words[0]);
        std::string expected;
        for (size_t i = 0; i < words.size(); i++) {
            if (found == words[i]) return i;
            expected += std::string(i ? " or " : "") + '"' + words[i] + '"';
        }
        wrong(key, expected.c_str(), quote(found));
    }
    // Empty where it is null.
    std::vector<int64_t> tokens_or(const char* key, const std::vector<int64_t>& missing) const {
        const auto found = values.find(key);
        if (found == values.end()) return missing;
        if (found->is_null()) return {};
        const json ids = found->is_array() && !found->empty() ? *found : json::array({*found});
        for (const json& id : ids)
            if (!id.is_number_integer() || id < 0 || id > INT32_MAX)
                wrong(key, "a token id", excerpt(*found));
        return ids.get<std::vector<int64_t>>();
    }
    int64_t token_or(const char* key, int64_t missing) const {
        const auto found = values.find(key);
        if (found != values.end() && found->is_array()) wrong(key, "a token id", excerpt(*found));
        const std::vector<int64_t> ids = tokens_or(key, {missing});
        return ids.empty() ? -1 : ids[0];
    }
};

// A model_type of config.json: the class in transformers, and the values that transformers takes for absent fields.
struct ModelType {
    const char *name, *architecture;
    int64_t max_context;
    int64_t NKV = 0;         // 0: num_attention_heads
    int64_t HD = 0;          // 0: hidden_size / num_attention_heads
    bool can_slide = false;  // whether layers may have a sliding window
    int64_t window = 0;      // 0: none
    // Whether use_sliding_window and max_window_layers say which layers have it.
    bool chooses_window = false;
    int64_t bos = 1, eos = 2, pad = -1;  // -1: none
    double eps = 1e-6;
    bool qkv_bias = false, qk_norm = false, is_fused = false;
    bool output_norm = false, joint_qk_norm = false;
    int64_t original_context =
        0;  // not 0: RoPE's only scaling is LongRoPE, and config.json, not rope_scaling, has this
};
constexpr ModelType model_types[] = {
    {"llama", "LlamaForCausalLM", 2048},
    {.name = "mistral",
     .architecture = "MistralForCausalLM",
     .max_context = 131072,
     .NKV = 8,
     .can_slide = true,
     .window = 4096},
    {.name = "qwen2",
     .architecture = "Qwen2ForCausalLM",
     .max_context = 32768,
     .NKV = 32,
     .can_slide = true,
     .window = 4096,
     .chooses_window = true,
     .bos = -1,
     .eos = -1,
     .qkv_bias = true},
    {.name = "qwen3",
     .architecture = "Qwen3ForCausalLM",
     .max_context = 32768,
     .NKV = 32,
     .HD = 128,
     .can_slide = true,
     .window = 4096,
     .chooses_window = true,
     .bos = -1,
     .eos = -1,
     .qk_norm = true},
    {.name = "phi3",
     .architecture = "Phi3ForCausalLM",
     .max_context = 4096,
     .can_slide = true,
     .eos = 32000,
     .pad = 32000,
     .eps = 1e-5,
     .is_fused = true,
     .original_context = 4096},
    {.name = "olmo2",
     .architecture = "Olmo2ForCausalLM",
     .max_context = 2048,
     .bos = -1,
     .eos = 50279,
     .pad = 1,
     .eps = 1e-5,
     .qk_norm = true,
     .output_norm = true,
     .joint_qk_norm = true},
    {.name = "gpt2", .architecture = "GPT2LMHeadModel", .max_context = 1024},
    {.name = "bert", .architecture = "BertForMaskedLM", .max_context = 512},
};

const ModelType& model_type(const Config& c) {
    return *std::ranges::find_if(model_types,
                                 [&](const ModelType& type) { return c.model_type == type.name; });
}

// Words of config.json, in the order of the enumeration.
constexpr const char *norm_names[] = {"rmsnorm"}, *activations[] = {"silu"}, *positions[] = {"rope"},
                     *gpt2_activations[] = {"gelu_new", "gelu", "gelu_pytorch_tanh"},
                     *bert_activations[] = {"gelu", "gelu_new", "gelu_pytorch_tanh"},
                     *bert_positions[] = {"absolute"},
                     *rope_types[] = {"default", "linear", "llama3", "yarn", "longrope"},
                     *long_types[] = {"default", "longrope"},
                     *layer_types[] = {"full_attention", "sliding_attention"};

// YaRN's factor of cosines and sines (Peng et al., 2023, equation 22).
double yarn_attention(const ConfigFields& s, double factor) {
    const auto of = [&](double scale) { return factor <= 1 ? 1.0 : 0.1 * scale * std::log(factor) + 1.0; };
    const double own = s.option_or("attention_factor", 0), some = s.option_or("mscale", 0),
                 all = s.option_or("mscale_all_dim", 0);
    return own > 0 ? own : some > 0 && all > 0 ? of(some) / of(all) : of(1);
}

// LongRoPE's (Ding et al. 2024), where a file has none.
double longrope_factor(const Config& c) {
    return static_cast<double>(c.max_context) / static_cast<double>(c.rope_scaling.original_context);
}
double longrope_attention(double factor, int64_t original_context) {
    return std::sqrt(1 + std::log(std::max(factor, 1.0)) / std::log(static_cast<double>(original_context)));
}

// `f` has the original context, and `s` the rest, as Phi3Config takes them.
void read_longrope(const ConfigFields& f, const ConfigFields& s, Config& c) {
    RopeScaling& r = c.rope_scaling;
    r.kind = RopeKind::longrope;
    r.original_context =
        f.size_or("original_max_position_embeddings", INT32_MAX, model_type(c).original_context, 2);
    r.factor = longrope_factor(c);
    r.short_factor = s.divisors("short_factor", c.rotary_size() / 2);
    r.long_factor = s.divisors("long_factor", c.rotary_size() / 2);
    r.attention_factor = s.option_or(
        "attention_factor", longrope_attention(s.positive_or("factor", r.factor), r.original_context));
}

// transformers 4 has rope_theta and rope_scaling, transformers 5 one object, rope_parameters. Where a file has both, both
// versions take rope_scaling.
void read_rope(const ConfigFields& f, Config& c) {
    const json* const older = f.find("rope_scaling");
    const char* const key = older && !older->empty() ? "rope_scaling" : "rope_parameters";
    const json* const scaling = f.find(key);
    c.rope_theta = f.positive_or("rope_theta", c.rope_theta);
    const bool partial = model_type(c).original_context > 0;
    c.rotary_factor = f.rotary_factor_or(1, c.HD, partial);
    if (!scaling) return;
    if (!scaling->is_object()) f.wrong(key, "an object or null", excerpt(*scaling));
    const std::string where = f.file + ": " + key;
    const ConfigFields s{where, *scaling};
    for (const char* const type : layer_types)
        if (s.find(type)) s.wrong(type, "none, as all layers have the same rotary positions", "an object");
    c.rope_theta = s.positive_or("rope_theta", c.rope_theta);
    c.rotary_factor = s.rotary_factor_or(c.rotary_factor, c.HD, partial);
    RopeScaling& r = c.rope_scaling;
    const char* const kind = s.find("rope_type") ? "rope_type" : "type";
    if (partial) {
        if (s.choice(kind, long_types) == 1) read_longrope(f, s, c);
        return;
    }
    r.kind = static_cast<RopeKind>(s.choice(kind, std::span(rope_types).first<4>()));
    if (r.kind == RopeKind::plain) return;
    if (r.kind != RopeKind::linear)  // the order and the default are transformers'
        r.original_context = f.find("original_max_position_embeddings")
                                 ? f.size("original_max_position_embeddings", INT32_MAX)
                                 : s.size_or("original_max_position_embeddings", INT32_MAX, c.max_context);
    const bool is_yarn = r.kind == RopeKind::yarn;
    r.factor = is_yarn && !s.find("factor")
                   ? static_cast<double>(c.max_context) / static_cast<double>(r.original_context)
                   : s.positive("factor");
    if (r.kind == RopeKind::llama3) {
        r.low = s.positive("low_freq_factor");
        r.high = s.positive("high_freq_factor");
        if (r.low >= r.high)
            s.wrong("low_freq_factor",
                    ("less than high_freq_factor " + excerpt((*scaling)["high_freq_factor"])).c_str(),
                    excerpt((*scaling)["low_freq_factor"]));
    }
    if (!is_yarn) return;
    r.low = s.option_or("beta_slow", 1);
    r.high = s.option_or("beta_fast", 32);
    r.truncate = s.flag_or("truncate", true);
    r.attention_factor = yarn_attention(s, r.factor);
    if (c.rope_theta <= 1) f.wrong("rope_theta", "more than 1", json(c.rope_theta).dump());
}

// As read_rope() takes it.
nlohmann::ordered_json scaling_json(const Config& c) {
    const RopeScaling& r = c.rope_scaling;
    if (r.kind == RopeKind::plain) return nullptr;
    if (r.kind == RopeKind::longrope) {
        // transformers 4 takes these three fields alone; both versions derive the attention factor from the two lengths.
        nlohmann::ordered_json scaling = {
            {"type", "longrope"}, {"short_factor", r.short_factor}, {"long_factor", r.long_factor}};
        if (r.attention_factor != longrope_attention(longrope_factor(c), r.original_context))
            scaling["attention_factor"] = r.attention_factor;
        return scaling;
    }
    nlohmann::ordered_json scaling = {{"rope_type", rope_types[static_cast<int>(r.kind)]},
                                      {"factor", r.factor}};
    if (r.kind == RopeKind::linear) return scaling;
    const bool is_yarn = r.kind == RopeKind::yarn;
    scaling[is_yarn ? "beta_slow" : "low_freq_factor"] = r.low;
    scaling[is_yarn ? "beta_fast" : "high_freq_factor"] = r.high;
    scaling["original_max_position_embeddings"] = r.original_context;
    if (is_yarn) scaling.update({{"attention_factor", r.attention_factor}, {"truncate", r.truncate}});
    return scaling;
}

// Fields of Llama's that GPT-2's and BERT's config.json do not have, besides `others`.
void refuse_llamas(const ConfigFields& f, const Config& c, std::vector<const char*> others) {
    others.insert(others.end(),
                  {"num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rope_parameters",
                   "layer_types", "attention_bias", "mlp_bias", "normalization_function"});
    for (const char* const key : others)
        if (const json* const found = f.find(key))
            f.wrong(key, ("none in a model of type " + c.model_type).c_str(), excerpt(*found));
    if (const json* const window = f.find("sliding_window"))
        f.wrong("sliding_window", "null", excerpt(*window));
}
// Whether a probability of dropout is not 0; transformers' default is 0.1.
bool has_dropout(const ConfigFields& f, std::initializer_list<const char*> keys) {
    return std::ranges::any_of(keys, [&](const char* key) {
        const json* const rate = f.find(key);
        return !rate || *rate != 0;
    });
}

// GPT-2's architecture, of its own field names.
void read_gpt2(const ConfigFields& f, Config& c) {
    refuse_llamas(f, c,
                  {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                   "max_position_embeddings", "rms_norm_eps", "hidden_act", "position_embedding_type"});
    c.norm = NormKind::layer;
    c.positions = PositionKind::learned;
    c.activation = gpt2_activations[f.choice("activation_function", gpt2_activations)] == "gelu"sv
                       ? ActivationKind::gelu
                       : ActivationKind::gelu_tanh;
    c.qkv_bias = c.output_bias = c.mlp_bias = true;
    c.tied = f.flag_or("tie_word_embeddings", true);
    c.bos = 50256, c.eos = {50256};
    for (const char* const key : {"scale_attn_by_inverse_layer_idx", "add_cross_attention"})
        if (f.flag_or(key, false)) f.wrong(key, "false", "true");
    if (!f.flag_or("scale_attn_weights", true)) f.wrong("scale_attn_weights", "true", "false");
    c.has_dropout = has_dropout(f, {"resid_pdrop", "embd_pdrop", "attn_pdrop"});
    c.C = f.size_or("n_embd", max_width, 768);
    c.F = f.size_or("n_inner", max_width, 4 * c.C);
    c.L = f.size_or("n_layer", max_layers, 12);
    c.NH = c.NKV = f.size_or("n_head", max_width, 12);
    c.max_context = f.size_or("n_positions", INT32_MAX, model_type(c).max_context);
    c.eps = f.positive_or("layer_norm_epsilon", 1e-5);
}

// BERT's, an encoder.
void read_bert(const ConfigFields& f, Config& c) {
    refuse_llamas(f, c, {"rms_norm_eps"});
    c.norm = NormKind::layer;
    c.positions = PositionKind::learned;
    f.choice("position_embedding_type", bert_positions);
    c.activation = bert_activations[f.choice("hidden_act", bert_activations)] == "gelu"sv
                       ? ActivationKind::gelu
                       : ActivationKind::gelu_tanh;
    c.qkv_bias = c.output_bias = c.mlp_bias = true;
    c.causal = false, c.post_norm = true, c.tied = true;
    if (!f.flag_or("tie_word_embeddings", true)) f.wrong("tie_word_embeddings", "true", "false");
    for (const char* const key : {"is_decoder", "add_cross_attention"})
        if (f.flag_or(key, false)) f.wrong(key, "false", "true");
    c.has_dropout = has_dropout(f, {"hidden_dropout_prob", "attention_probs_dropout_prob"});
    c.bos = -1, c.eos = {};
    if (!f.values.contains("pad_token_id")) c.pad = 0;
    c.C = f.size_or("hidden_size", max_width, 768);
    c.F = f.size_or("intermediate_size", max_width, 3072);
    c.L = f.size_or("num_hidden_layers", max_layers, 12);
    c.NH = c.NKV = f.size_or("num_attention_heads", max_width, 12);
    c.max_context = f.size_or("max_position_embeddings", INT32_MAX, model_type(c).max_context);
    c.token_types = f.size_or("type_vocab_size", max_width, 2);
    c.eps = f.positive_or("layer_norm_eps", 1e-12);
}

// With layer_types, transformers computes Mistral as Ministral: a window for the layers that slide.
void read_layer_types(const ConfigFields& f, Config& c) {
    const json* const types = f.find("layer_types");
    if (types && c.is_fused)
        f.wrong("layer_types", ("none in a model of type " + c.model_type).c_str(), excerpt(*types));
    if (!types && model_type(c).chooses_window && c.window) {
        const int64_t begin = f.size_or("max_window_layers", max_layers, 28, 0);
        for (int64_t layer = 0; layer < c.L; layer++) c.slides.push_back(layer >= begin);
    }
    if (!types) return;
    const std::string expected = "a list of num_hidden_layers = " + std::to_string(c.L) + " types";
    if (!types->is_array() || static_cast<int64_t>(types->size()) != c.L)
        f.wrong("layer_types", expected.c_str(), excerpt(*types));
    for (const json& type : *types) {
        if (type != layer_types[0] && type != layer_types[1])
            f.wrong("layer_types", "\"full_attention\" or \"sliding_attention\"", excerpt(type));
        c.slides.push_back(type == layer_types[1]);
        if (c.slides.back() && !c.window)
            f.wrong("layer_types", "\"full_attention\" without sliding_window", excerpt(type));
    }
}

void refuse_other_models(const ConfigFields& f, const Config& c) {
    if (c.output_bias) f.wrong("attention_bias", "false", "true");
    if (c.mlp_bias) f.wrong("mlp_bias", "false", "true");
    if (f.flag_or("use_qk_norm", false)) f.wrong("use_qk_norm", "false", "true");
    if (c.window && !model_type(c).can_slide) f.wrong("sliding_window", "null", std::to_string(c.window));
}

void read_llama(const ConfigFields& f, Config& c) {
    c.activation = static_cast<ActivationKind>(f.choice("hidden_act", activations));
    c.norm = static_cast<NormKind>(f.choice("normalization_function", norm_names));
    c.positions = static_cast<PositionKind>(f.choice("position_embedding_type", positions));
    const ModelType& type = model_type(c);
    c.output_bias = f.flag_or("attention_bias", false);
    c.qkv_bias = c.output_bias || type.qkv_bias;
    c.mlp_bias = f.flag_or("mlp_bias", false);
    c.qk_norm = type.qk_norm, c.is_fused = type.is_fused;
    c.output_norm = type.output_norm, c.joint_qk_norm = type.joint_qk_norm;
    if (!type.chooses_window || f.flag_or("use_sliding_window", false))
        c.window = f.size_or("sliding_window", INT32_MAX, f.missing("sliding_window", type.window, 0));
    c.bos = type.bos, c.eos.assign(type.eos >= 0, type.eos);
    if (type.pad >= 0 && !f.values.contains("pad_token_id")) c.pad = type.pad;
    c.tied = f.flag_or("tie_word_embeddings", c.tied);
    refuse_other_models(f, c);
    c.C = f.size("hidden_size", max_width);
    c.F = f.size("intermediate_size", max_width);
    c.L = f.size("num_hidden_layers", max_layers);
    read_layer_types(f, c);
    c.NH = f.size("num_attention_heads", max_width);
    c.NKV = f.size_or("num_key_value_heads", max_width, f.missing("num_key_value_heads", type.NKV, c.NH));
    if (c.NH % c.NKV)
        f.wrong("num_attention_heads", "a multiple of num_key_value_heads",
                std::to_string(c.NH) + " and " + std::to_string(c.NKV));
    c.HD = f.size_or("head_dim", max_width, f.missing("head_dim", type.HD, 0));
    c.max_context = f.size_or("max_position_embeddings", INT32_MAX, type.max_context);
    c.eps = f.positive_or("rms_norm_eps", type.eps);
}

// " (...)" with how to get it, where the name may be a model's on the Hugging Face hub: "owner/name".
std::string how_to_fetch(const std::string& model) {
    const size_t slash = model.find('/');
    const bool is_id = slash != model.npos && slash > 0 && slash + 1 < model.size() && model[0] != '.' &&
                       model[0] != '~' && model.find('/', slash + 1) == model.npos;
    if (!is_id) return "";
    const std::string name = model.substr(slash + 1);
    return "; a model of the Hugging Face hub is fetched with `hf download " + model + " --local-dir " +
           name + "` (pip install huggingface_hub), then --model " + name;
}

std::string preset_names() {
    const std::string_view folder = "models/", end = ".json";
    std::string names;
    for (const EmbeddedFile& file : embedded_files()) {
        if (file.name.substr(0, folder.size()) != folder) continue;
        const std::string_view name = file.name.substr(folder.size());
        names += (names.empty() ? "" : ", ") + std::string(name.substr(0, name.size() - end.size()));
    }
    return names;
}

// The values of a model's config.json, and its name in messages.
std::pair<std::string, json> read_config(const std::string& model) {
    std::error_code none;  // a path without access is treated as absent
    std::string file = model;
    if (fs::is_directory(model, none))
        file = fs::path(model) / "config.json";
    else if (fs::path(model).extension() != ".json") {
        const EmbeddedFile* const preset = find_embedded("models/" + model + ".json");
        if (!preset)
            fail("--model ", model, ": expected a directory with config.json or a preset (", preset_names(),
                 "), found neither", how_to_fetch(model));
        file = "preset " + model;
        return {file, parse_json(preset->text, file)};
    }
    return {file, read_json(file)};
}

}  // namespace

Config load_config(const std::string& model) {
    const auto [file, values] = read_config(model);
    if (!values.is_object()) fail(file, ": expected a JSON object, found ", values.type_name());
    const ConfigFields f{file, values};
    Config c{};
    std::vector<const char*> names;
    for (const ModelType& type : model_types) names.push_back(type.name);
    c.model_type = names[f.choice("model_type", names)];
    if (const json* method = f.find("quantization_config"))
        f.wrong("quantization_config", "none, as quantized weights cannot be trained; use the original model",
                excerpt(*method));
    c.V = c.is_gpt2()   ? f.size_or("vocab_size", max_width, 50257)
          : c.is_bert() ? f.size_or("vocab_size", max_width, 30522)
                        : f.size("vocab_size", max_width);
    if (c.is_gpt2())
        read_gpt2(f, c);
    else if (c.is_bert())
        read_bert(f, c);
    else
        read_llama(f, c);
    if (!c.HD && c.C % c.NH)
        f.wrong(c.is_gpt2() ? "n_embd" : "hidden_size",
                c.is_gpt2() ? "a multiple of n_head" : "a multiple of num_attention_heads",
                std::to_string(c.C) + " and " + std::to_string(c.NH));
    if (!c.HD) c.HD = c.C / c.NH;
    if (c.HD % 2) f.wrong("head_dim", "even", std::to_string(c.HD));
    if (c.qkv_size() > max_width)
        f.wrong("head_dim",
                ("queries, keys and values of together at most " + std::to_string(max_width)).c_str(),
                std::to_string(c.qkv_size()));
    c.initializer_range = f.positive_or("initializer_range", c.initializer_range);
    c.bos = f.token_or("bos_token_id", c.bos);
    c.eos = f.tokens_or("eos_token_id", c.eos);
    if (const json* pad = f.find("pad_token_id"); pad && pad->is_number_integer() && is_int64(*pad))
        c.pad = pad->get<int64_t>();
    if (c.positions == PositionKind::rope) read_rope(f, c);
    const double layer = static_cast<double>(c.C) * static_cast<double>(c.qkv_size() + c.q_size() + 3 * c.F);
    const int64_t positions = c.positions == PositionKind::learned ? c.max_context + c.token_types : 0;
    if (static_cast<double>(c.L) * layer + static_cast<double>((2 * c.V + positions) * c.C) > max_parameters)
        fail(file, ": expected fewer than 2^48 parameters");
    return c;
}

std::string config_json(const Config& c, DType dtype) {
    using ordered = nlohmann::ordered_json;
    const ModelType& type = model_type(c);
    ordered values = {{"architectures", {type.architecture}}, {"model_type", type.name}, {"vocab_size", c.V}};
    if (c.is_gpt2()) {
        values.update({{"n_embd", c.C},
                       {"n_inner", c.F},
                       {"n_layer", c.L},
                       {"n_head", c.NH},
                       {"n_positions", c.max_context},
                       {"layer_norm_epsilon", c.eps},
                       {"activation_function", c.activation == ActivationKind::gelu ? "gelu" : "gelu_new"},
                       {"resid_pdrop", 0.0},
                       {"embd_pdrop", 0.0},
                       {"attn_pdrop", 0.0},
                       {"initializer_range", c.initializer_range},
                       {"tie_word_embeddings", c.tied}});
    } else if (c.is_bert()) {
        values.update({{"hidden_size", c.C},
                       {"intermediate_size", c.F},
                       {"num_hidden_layers", c.L},
                       {"num_attention_heads", c.NH},
                       {"max_position_embeddings", c.max_context},
                       {"type_vocab_size", c.token_types},
                       {"layer_norm_eps", c.eps},
                       {"hidden_act", c.activation == ActivationKind::gelu ? "gelu" : "gelu_new"},
                       {"hidden_dropout_prob", 0.0},
                       {"attention_probs_dropout_prob", 0.0},
                       {"initializer_range", c.initializer_range},
                       {"tie_word_embeddings", c.tied},
                       {"pad_token_id", nullptr}});
    } else {
        values.update({{"hidden_size", c.C},
                       {"intermediate_size", c.F},
                       {"num_hidden_layers", c.L},
                       {"num_attention_heads", c.NH},
                       {"num_key_value_heads", c.NKV},
                       {"head_dim", c.HD},
                       {"max_position_embeddings", c.max_context},
                       {"rms_norm_eps", c.eps},
                       {"rope_theta", c.rope_theta},
                       {"rope_scaling", scaling_json(c)},
                       {"tie_word_embeddings", c.tied},
                       {"initializer_range", c.initializer_range},
                       {"hidden_act", activations[static_cast<int>(c.activation)]},
                       {"attention_bias", c.output_bias},
                       {"mlp_bias", c.mlp_bias}});
    }
    values.update({{"bos_token_id", c.bos < 0 ? ordered(nullptr) : ordered(c.bos)},
                   {"eos_token_id", c.eos.empty()       ? ordered(nullptr)
                                    : c.eos.size() == 1 ? ordered(c.eos[0])
                                                        : ordered(c.eos)},
                   {"torch_dtype", info(dtype).python}});
    if (c.rope_scaling.kind == RopeKind::longrope)
        values["original_max_position_embeddings"] = c.rope_scaling.original_context;
    if (c.rotary_factor < 1) values["partial_rotary_factor"] = c.rotary_factor;
    if (type.can_slide) values["sliding_window"] = c.window ? ordered(c.window) : ordered(nullptr);
    if (type.chooses_window) values["use_sliding_window"] = c.window > 0;
    for (const bool slides : c.slides) values["layer_types"].push_back(layer_types[slides]);
    if (type.pad >= 0) values["pad_token_id"] = nullptr;
    if (c.pad) values["pad_token_id"] = *c.pad;
    return values.dump(2) + "\n";
}

}  // namespace llamac
