// Models that hold a range of the layers, with several micro-batches in flight, and models of which some parameters do not
// train: what they compute has the bits of the whole model, one micro-batch after the other.
#include <map>

#include "checkpoint/config_json.h"
#include "core/device_memory.h"
#include "model/optimizer.h"
#include "small_run.h"

using namespace llamac;

namespace model_checks {
namespace {

constexpr int64_t B = 2, T = 16, V = 96, micro_batches = 2;

Config small_model(const std::string& type) {
    put("config.json", R"({"model_type": ")" + type +
                           R"(", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "max_position_embeddings": 64, "initializer_range": 0.1, "tie_word_embeddings": false)" +
                           (type == "phi3" ? R"(, "partial_rotary_factor": 0.5})" : "}"));
    return load_config(in_folder("config.json"));
}

struct Case {
    std::string name;
    DType dtype;
    Recompute recompute = {};
    std::optional<Fp8Options> fp8 = {};
    const char* type = "llama";
};
const Case cases[] = {
    {"f32", DType::f32},
    {"f32, block", DType::f32, {.block_every = 1}},
    {"bf16", DType::bf16},
    {"bf16, norm and swiglu", DType::bf16, {.norm = true, .swiglu = true}},
    {"fp8", DType::bf16, {.attention = true, .block_every = 2}, Fp8Options{.keep_first = 1, .head = true}},
    {"fp8, stored", DType::bf16, {.norm = true}, Fp8Options{.weights = Fp8Weights::stored, .head = true}},
    {"fp8, tensor", DType::bf16, {.swiglu = true}, Fp8Options{.scaling = Fp8Scaling::current}},
    {"fp8, row", DType::bf16, {}, Fp8Options{.scaling = Fp8Scaling::row, .keep_last = 1}},
    {"qwen2", DType::bf16, {.qkv = true, .attention = true}, {}, "qwen2"},
    {"qwen2 in fp8", DType::bf16, {}, Fp8Options{}, "qwen2"},
    {"qwen3", DType::bf16, {.norm = true, .qkv = true}, {}, "qwen3"},
    {"qwen3 in fp8", DType::bf16, {.block_every = 2}, Fp8Options{}, "qwen3"},
    {"phi3", DType::bf16, {.qkv = true}, {}, "phi3"},
    {"phi3 in fp8", DType::bf16, {.swiglu = true}, Fp8Options{}, "phi3"},
    {"olmo2", DType::bf16, {.norm = true, .qkv = true}, {}, "olmo2"},
    {"olmo2 in fp8", DType::bf16, {.block_every = 2}, Fp8Options{}, "olmo2"}};

ModelOptions options_of(const Case& c) {
    ModelOptions o;
    o.batch_size = B, o.seq_len = T;
    o.precision = {.weights = c.dtype, .gradients = DType::f32};
    o.recompute = c.recompute;
    o.fp8 = c.fp8;
    o.document_mask = true;
    return o;
}

using Bits = std::map<std::string, std::string>;  // losses and gradients, by name
void add_gradients(Bits& all, const Model& m) {
    for (const Parameter& parameter : m.parameters.table)
        if (parameter.trains) all[parameter.name] = bits_of(m.parameters.gradient(parameter));
}
void add_losses(Bits& all, const Model& m, int64_t micro) {
    all["losses " + std::to_string(micro)] = bits_of(m.activations.losses);
}

// Micro-batches differ in their ids, in their lengths, and in that only the first has documents.
void set_micro_batch(Model& m, int64_t micro) {
    std::vector<int32_t> tokens(static_cast<size_t>(B * T)), targets(tokens.size()), first(tokens.size());
    for (int64_t i = 0; i < B * T; i++) {
        tokens[static_cast<size_t>(i)] = static_cast<int32_t>((i * i + 7 * i + 31 * micro) % V);
        targets[static_cast<size_t>(i)] = static_cast<int32_t>((3 * i + 5 + micro) % V);
        first[static_cast<size_t>(i)] = i % T < 5 ? 0 : 5;
    }
    set_batch(m, tokens.data(), targets.data(), B, micro ? T / 2 : T, micro ? nullptr : first.data());
}

void prepare(Model& m) {
    m.allocate();
    initialize(m.context, m.parameters, m.config, 1);
}

// One micro-batch after the other. steps: of the optimizer before, after which fp8 has scales that are known ahead.
void step(Model& m) {
    const float lr = 0.01f;
    const int32_t number = 1;
    set_step(m, &lr, &number);
    optimizer_step(m, {0.9, 0.95, 1e-8, 0.1, 1.0}, 1);
}
Bits whole(const Config& config, ModelOptions options, bool updates = false) {
    Model m(config, options);
    prepare(m);
    Bits bits;
    for (int64_t micro = 0; micro < micro_batches; micro++) {
        set_micro_batch(m, micro);
        forward_backward(m, micro == 0, micro == micro_batches - 1);
        add_losses(bits, m, micro);
    }
    add_gradients(bits, m);
    if (updates) step(m);
    for (const Parameter& parameter : m.parameters.table)
        if (updates) bits["new " + parameter.name] = bits_of(m.parameters.weight(parameter));
    return bits;
}

void move(const Tensor& to, const Tensor& from) {
    const std::string bits = bits_of(from);
    check(to.bytes() == from.bytes(), "both stages have one shape");
    copy_bytes(to.data, bits.data(), to.bytes());
}

// Layers [0,k) and [k,L): both stages compute all micro-batches before the first gradient.
Bits in_stages(const Config& config, ModelOptions options, int64_t k) {
    options.micro_batches = micro_batches;
    ModelOptions of_second = options;
    options.layers = {{0, k}}, of_second.layers = {{k, config.L}};
    Model first(config, options), second(config, of_second);
    prepare(first), prepare(second);
    Bits bits;
    for (int64_t micro = 0; micro < micro_batches; micro++) {
        for (Model* m : {&first, &second}) {
            use_micro_batch(*m, micro);
            set_micro_batch(*m, micro);
        }
        forward_layers(first, micro == 0);
        move(second.activations.embedding, first.activations.blocks[static_cast<size_t>(k - 1)].residual_out);
        forward_layers(second, micro == 0);
    }
    for (int64_t micro = 0; micro < micro_batches; micro++) {
        const bool last = micro == micro_batches - 1;
        for (Model* m : {&first, &second}) use_micro_batch(*m, micro);
        backward_layers(second, micro == 0, last);
        add_losses(bits, second, micro);
        move(first.activations.dresidual, second.activations.dresidual);
        backward_layers(first, micro == 0, last);
    }
    add_gradients(bits, first), add_gradients(bits, second);
    return bits;
}

void check_stages_of(const std::string& name, const Config& config, const ModelOptions& options) {
    const Bits one = whole(config, options);
    for (const int64_t k : {1, 2, 3}) {
        const Bits two = in_stages(config, options, k);
        check(two.size() == one.size(), name + ": as many gradients");
        for (const auto& [tensor, bits] : one)
            check(two.contains(tensor) && two.at(tensor) == bits,
                  name + ", layers from " + std::to_string(k) + " on: " + tensor);
    }
}

TEST(check_stages) {
    for (const Case& c : cases) check_stages_of(c.name, small_model(c.type), options_of(c));
    ModelOptions adapters = options_of(cases[3]);
    adapters.frozen = {"*"}, adapters.lora = {4, 8, {"q", "v", "gate", "down"}};
    check_stages_of("adapters", small_model("llama"), adapters);
}

// What trains has the gradients that it has in the whole model; what does not has no memory of training, and stays as it is.
TEST(check_frozen) {
    for (const Case& c : cases) {
        const Config config = small_model(c.type);
        const ModelOptions all = options_of(c);
        ModelOptions some = all;
        some.frozen = {"model.embed_tokens.weight", "model.layers.[02].*", "model.layers.1.mlp.*",
                       "*norm.weight"};
        const Bits one = whole(config, all), two = whole(config, some, true);
        Model m(config, some), before(config, some);
        prepare(before);
        int64_t trained = 0, frozen = 0, multiplied = 0;
        for (const Parameter& parameter : m.parameters.table) {
            const std::string bits = two.at("new " + parameter.name);
            (parameter.trains ? trained : frozen) += parameter.elements();
            if (!parameter.trains && parameter.group.multiplied) multiplied += parameter.elements();
            if (parameter.trains)
                check(two.at(parameter.name) == one.at(parameter.name),
                      c.name + ": gradient of " + parameter.name);
            check((bits == bits_of(before.parameters.weight(parameter))) != parameter.trains,
                  c.name + ": " + parameter.name + (parameter.trains ? " is updated" : " stays"));
            check(parameter.trains || m.parameters.held(m.parameters.m, parameter).second == 0,
                  parameter.name + " has no moments");
        }
        const Parameters& p = m.parameters;
        check(frozen > trained && trained <= p.elements && p.elements < trained + 64 * std::ssize(p.table));
        check(p.gradients.elements() == p.elements && p.m.elements() == p.elements);
        check(p.trained() == trained &&
              flops_per_token(p, config, 8) == flops_per_token(config, 8) - 2.0 * multiplied);
    }
    ModelOptions half = options_of(cases[0]);
    half.frozen = {"*q_proj*"};
    refused("half of a matrix frozen", {"k_proj", "one matrix"}, [&] { Model(small_model("llama"), half); });
}

}  // namespace
}  // namespace model_checks
