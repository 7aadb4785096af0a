#include "train/inference.h"
#include "checkpoint/weights.h"

#include <algorithm>
#include <functional>

#include "core/device_memory.h"
#include "ops/operations.h"

namespace llamac {
namespace {

Config checked_config(const InferenceOptions& o, std::string& warning) {
    const Config config = load_config_of_weights(o.model, warning);
    if (!config.causal)
        fail(o.model, ": a model of type ", config.model_type,
             " is not causal: it generates no text and has no scores");
    const int64_t longest = std::max(o.seq_len, o.cache.positions);
    if (longest > config.max_context)
        fail(o.model, ": expected sequences of at most ", config.max_context,
             " tokens, the model's longest (", config.max_context_field(), "), found ", longest);
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
    // Of whole batches whose losses are wanted: on a GPU the head's product is faster the more rows it has.
    constexpr int64_t scored_bytes = int64_t{512} << 20;
    if (o.cache.positions == 0 && computing_context().backend == Backend::device)
        m.logits_bytes = scored_bytes;
    return m;
}

}  // namespace

Inference::Inference(const InferenceOptions& o)
    : model(checked_config(o, warnings), model_options_of(o)), found(o.batch_size * o.seq_len * 4) {
    model.allocate();
    const std::string unused = load_weights(model.parameters, o.model);
    warnings += (warnings.empty() || unused.empty() ? "" : "\n") + unused;
}

std::vector<float> Inference::next_logits(std::span<const int32_t> tokens, size_t prompt) {
    const auto length = static_cast<int64_t>(tokens.size()), first = static_cast<int64_t>(prompt);
    if (first < 1 || first > length || length > model.options.cache.positions)
        fail("next_logits: expected a prompt of 1 to ", length, " tokens and at most ",
             model.options.cache.positions, " tokens, found ", first, " and ", length);
    std::vector<float> all, logits;
    begin_sequences(model, {&first, 1});
    prefill(model, 0, tokens.first(prompt), logits);
    all.insert(all.end(), logits.begin(), logits.end());
    for (size_t i = prompt; i < tokens.size(); i++) {
        decode(model, tokens.subspan(i, 1), logits);
        all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
}

void Inference::score(const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T,
                      std::span<float> losses, std::span<bool> is_argmax) {
    CHECK(static_cast<int64_t>(losses.size()) == B * T);
    if (!is_argmax.empty())
        model.hook = [this, seen = int64_t{0}](const std::string& name, const Tensor& value) mutable {
            if (name != "logits") return;
            const int64_t rows = value.shape[0];
            argmax(model.context,
                   {.out = make_tensor(static_cast<int32_t*>(found.data) + seen, DType::i32, {rows}),
                    .x = value});
            seen += rows;
        };
    set_batch(model, tokens, targets, B, T);
    forward(model);
    model.hook = nullptr;
    copy_bytes(losses.data(), model.activations.losses.data, model.activations.losses.bytes());
    if (is_argmax.empty()) return;
    std::vector<int32_t> ids(static_cast<size_t>(B * T));
    copy_bytes(ids.data(), found.data, B * T * 4);
    std::transform(ids.begin(), ids.end(), targets, is_argmax.begin(), std::equal_to<>());
}

}  // namespace llamac
