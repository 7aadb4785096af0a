// Inference with a model: it continues prompts and computes the likelihood of texts.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/device_memory.h"
#include "model/model.h"

namespace llamac {

struct InferenceOptions {
    std::string model;                      // a directory with config.json and weights
    DType dtype = DType::f32;               // of weights and activations, whatever the files hold
    int64_t batch_size = 1, seq_len = 1;    // of a pass at most; prompts are read in parts of seq_len tokens
    CacheSize cache = {};                   // of generation (train/sample.h); may be none
    std::vector<std::string> kernels = {};  // as KernelChoices takes them
};

struct Inference {
    // Reads the weights. Throws Error with the file and the tensor, or if a sequence would be longer than the model's.
    explicit Inference(const InferenceOptions& options);

    std::string warnings;  // about the files, one line each
    Model model;

    // Logits [count,V], count = tokens - prompt + 1, after the first `prompt` tokens and after each later token, computed with
    // the cache as in generation.
    std::vector<float> next_logits(std::span<const int32_t> tokens, size_t prompt);
    // Of B sequences of T tokens, on the host: losses [B,T], -ln of the probability of each target, 0 where that is -100;
    // is_argmax [B,T], whether no other token is likelier: it may be empty, and then costs nothing.
    void score(const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T, std::span<float> losses,
               std::span<bool> is_argmax);

  private:
    DeviceMemory found;  // i32, of the argmax of each row of a batch
};

}  // namespace llamac
