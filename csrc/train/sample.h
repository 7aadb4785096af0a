// Written twice on purpose: llamac/training/sampling.py has the same; tests/test_program.py::test_the_same_losses.
//
// Text from a model: one token after another.
#pragma once
#include <functional>

#include "model/model.h"

namespace llamac {

struct Sampling {
    double temperature = 1;  // 0: the likeliest token
    int64_t top_k = 0;       // only the k likeliest tokens; 0: all
    uint64_t seed = 0;
    uint32_t step = 0;  // with the seed and the token's index, it decides the random number
};

// A token by its probability softmax(logits / temperature) among the top_k; u in (0,1). Ties go to the lower
// id.
int32_t pick(const std::vector<float>& logits, const Sampling& sampling, double u);

// `count` tokens that follow the prompt, of at least one token. The model sees at most its last seq_len tokens. between:
// called after each token.
std::vector<int32_t> generate(Model& model, std::vector<int32_t> prompt, int64_t count,
                              const Sampling& sampling, const std::function<void()>& between = {});

}  // namespace llamac
