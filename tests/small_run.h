// A run of seconds, without its loop, for tests: its model, data and options, and what its steps give.
#pragma once
#include <sstream>

#include "check.h"
#include "core/device_memory.h"
#include "core/observer.h"
#include "core/registry.h"
#include "train/evaluate.h"
#include "train/save.h"

namespace llamac {

namespace fs = std::filesystem;

// Heads of 64 channels, which the kernels on matrix cores take.
inline constexpr const char* model_json = R"({"model_type": "llama", "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 64, "max_position_embeddings": 64, "tie_word_embeddings": true, "initializer_range": 0.1})";

inline std::string tokens_bin(uint32_t count) {
    std::vector<uint32_t> header(256);
    header[0] = 20240520, header[1] = 1, header[2] = count;
    std::vector<uint16_t> tokens(count);
    for (uint32_t i = 1; i < count; i++)
        tokens[i] = static_cast<uint16_t>((tokens[i - 1] + (i * i % 7 < 3 ? 2 : 5)) % 128);
    return bytes_of(header) + bytes_of(tokens);
}

using Words = std::vector<std::string>;

inline Words words_of(const std::string& text) {
    std::istringstream stream(text);
    return {std::istream_iterator<std::string>(stream), {}};
}
inline Words with(Words words, const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
}

// Six steps of two micro-batches of 4 sequences of 16 tokens; `more` wins over that.
inline Options small_run(const Words& more = {}) {
    if (!fs::exists(in_folder("model"))) {
        fs::create_directories(in_folder("model"));
        put("model/config.json", model_json);
        put("train.bin", tokens_bin(3000));
        put("val.bin", tokens_bin(500));
    }
    Words words = words_of(
        "train_llama3 --tokenizer none --steps 6 --batch-size 4 --seq-len 16 --lr 0.01 --warmup-steps 2 "
        "--val-steps 2 --total-batch-size 128");
    for (const auto& [flag, name] : {std::pair{"--model", "model"},
                                     {"--train-data", "train.bin"},
                                     {"--val-data", "val.bin"},
                                     {"--gemm-cache", "gemm.json"},
                                     {"--out", "out"}})
        words.insert(words.end(), {flag, in_folder(name)});
    words.insert(words.end(), more.begin(), more.end());
    std::vector<const char*> arguments;
    for (const std::string& word : words) arguments.push_back(word.c_str());
    return parse_options(static_cast<int>(arguments.size()), arguments.data());
}

inline const Words precisions[] = {
    {},
    {"--dtype", "bf16"},
    {"--dtype", "bf16", "--grad-dtype", "bf16", "--optimizer-state", "bf16", "--master-weights", "off"},
    {"--dtype", "fp16"}};

// Whether the emulated device has all kernels for it.
inline bool has_kernels([[maybe_unused]] const Words& precision) {
#if !defined(LLAMAC_FP16_KERNELS)
    return precision != Words{"--dtype", "fp16"};
#else
    return true;
#endif
}

// Kernels for all operations, the first that takes a call; emulated where the host computes by default.
inline std::vector<std::string> all_kernels() {
    std::vector<std::string> choices;
    for (const Operation* op : operations()) {
        std::string names;
        for (const Variant& v : op->variants)
            if (v.backend() == Backend::device) names += (names.empty() ? "" : ",") + std::string(v.name);
        choices.push_back(op->name + "=" + names);
    }
    return choices;
}

struct Trained {
    std::vector<double> numbers;  // of each step: its step, loss, gradient norm, learning rate
    std::string weights;

    bool operator==(const Trained& other) const {
        return numbers == other.numbers && weights == other.weights;
    }
};

inline void finish(Trainer& t, int64_t in_flight, Trained& trained) {
    while (t.in_flight() > in_flight) {
        const StepResult r = t.finish_step();
        trained.numbers.insert(trained.numbers.end(), {double(r.step), r.loss, r.grad_norm, r.lr});
    }
}

inline std::string bits_of(const Tensor& t) {
    std::string bits(static_cast<size_t>(t.bytes()), '\0');
    if (t.data) copy_bytes(bits.data(), t.data, t.bytes());
    return bits;
}

// The steps that are left, with as many in flight as the trainer takes.
inline Trained train(Trainer& t) {
    Trained trained;
    while (t.step < t.options.steps) {
        t.start_step();
        finish(t, t.max_in_flight, trained);
    }
    finish(t, 0, trained);
    trained.weights = bits_of(t.model.parameters.weights);
    return trained;
}
inline Trained train(const Options& o, int64_t ahead) {
    Trainer t(o, ahead);
    return train(t);
}

// Three steps and a checkpoint in a folder of this name.
inline std::string saved_run(const Options& o) {
    fs::create_directories(o.out);
    Trainer t(o, 0);
    Trained trained;
    for (int k = 0; k < 3; k++) {
        t.start_step();
        finish(t, 0, trained);
    }
    return save(t, OpenFolder(o.out));
}

// f is told of each call of an operation.
inline Observer observe_calls(const std::function<void(const Call&, const Variant&)>& f) {
    return {[](hipStream_t) {}, f, [](int64_t, hipStream_t) {}};
}

}  // namespace llamac
