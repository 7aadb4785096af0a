// Text from a model, one token after another, with the keys and values of earlier tokens in the model's cache.
#pragma once
#include <functional>
#include <span>
#include <vector>

#include "model/model.h"

namespace llamac {

struct Sampling {
    double temperature = 1;  // 0: the likeliest token
    int64_t top_k = 0;       // only the k likeliest tokens; 0: all
    uint64_t seed = 0;
    uint32_t step = 0;  // with the seed and the token's index, it decides the random number
    double top_p = 1;   // of these, only the likeliest that have this share of the probability together
};

// Chooses tokens, without new memory after the first.
struct TokenChoice {
    // Draws from softmax(logits / temperature) over the tokens that `sampling` admits; u in (0,1) is the place in their sum, the
    // likeliest first. Ties go to the lower id.
    int32_t pick(std::span<const float> logits, const Sampling& sampling, double u);

  private:
    void sort(std::span<const float> logits, size_t count, size_t among);
    std::vector<int32_t> best;  // ids; the first `sorted` of them are the likeliest, in order
    size_t sorted = 0;
};

// Continues a prompt of at least one token by `count` tokens. The model sees at most the last seq_len tokens: by the cache up
// to its length, then by a pass over all of them per token. between: called after each token.
std::vector<int32_t> generate(Model& model, std::vector<int32_t> prompt, int64_t count,
                              const Sampling& sampling, const std::function<void()>& between = {});

struct Ending {
    int64_t count;                    // tokens at most
    std::vector<int32_t> stops = {};  // a sequence ends with the first of these, which belongs to it
};
// Continues all prompts, in batches as large as the cache allows. samplings: one per prompt, whose text does not depend on the
// others, except for rounding, and for LongRoPE's factors, which the longest chooses. made: called with each token; if it returns
// false, the sequence ends. Throws Error for a prompt that is empty, or longer with `count` tokens than the cache.
std::vector<std::vector<int32_t>> generate_all(
    Model& model, const std::vector<std::vector<int32_t>>& prompts, const Ending& ending,
    std::span<const Sampling> samplings, const std::function<bool(size_t prompt, int32_t token)>& made = {});

}  // namespace llamac
