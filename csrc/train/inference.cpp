#include "train/inference.h"

#include <algorithm>

namespace llamac {
namespace {

Config checked_config(const InferenceOptions& o) {
    const Config config = load_config(o.model);
    const int64_t longest = std::max(o.seq_len, o.cache.positions);
    if (longest > config.max_context)
        fail(o.model, ": expected sequences of at most ", config.max_context,
             " tokens, the model's longest (max_position_embeddings), found ", longest);
    return config;
}

ModelOptions model_options_of(const InferenceOptions& o) {
    ModelOptions m;
    m.batch_size = o.batch_size;
    m.seq_len = o.seq_len;
    m.precision = {o.dtype, o.dtype, o.dtype, false};
    m.kernels = o.kernels;
    m.training = false;
    m.cache = o.cache;
    return m;
}

// Whether each row's target is its likeliest token; of equals, the first.
void compare(const Tensor& logits, std::span<const int32_t> targets, std::span<bool> likeliest) {
    const int64_t V = logits.shape[1];
    std::vector<float> values(static_cast<size_t>(logits.elements()));
    copy_as(DType::f32, values.data(), logits);
    for (size_t row = 0; row < targets.size(); row++) {
        const float* of = values.data() + static_cast<int64_t>(row) * V;
        likeliest[row] = std::max_element(of, of + V) - of == targets[row];
    }
}

}  // namespace

Inference::Inference(const InferenceOptions& o) : model(checked_config(o), model_options_of(o)) {
    model.allocate();
    load_weights(model.parameters, o.model);
}

std::vector<float> Inference::next_logits(std::span<const int32_t> tokens, size_t prompt) {
    const auto length = static_cast<int64_t>(tokens.size()), first = static_cast<int64_t>(prompt);
    if (first < 1 || first > length || length > model.options.cache.positions)
        fail("next_logits: expected a prompt of 1 to ", length, " tokens and at most ",
             model.options.cache.positions, " tokens, found ", first, " and ", length);
    std::vector<float> all, logits;
    begin_sequences(model, {&first, 1});
    read_prompt(model, 0, tokens.first(prompt), logits);
    all.insert(all.end(), logits.begin(), logits.end());
    for (size_t i = prompt; i < tokens.size(); i++) {
        read_tokens(model, tokens.subspan(i, 1), logits);
        all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
}

void Inference::score(const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T,
                      std::span<float> losses, std::span<bool> likeliest) {
    CHECK(static_cast<int64_t>(losses.size()) == B * T);
    size_t seen = 0;  // rows whose logits have been
    if (!likeliest.empty())
        model.hook = [&](const std::string& name, const Tensor& value) {
            if (name != "logits") return;
            const auto rows = static_cast<size_t>(value.shape[0]);
            compare(value, {targets + seen, rows}, likeliest.subspan(seen, rows));
            seen += rows;
        };
    set_batch(model, tokens, targets, B, T);
    forward(model);
    model.hook = nullptr;
    copy_bytes(losses.data(), model.activations.losses.data, model.activations.losses.bytes());
}

}  // namespace llamac
