// Text from a model, one token after another, with the keys and values of earlier tokens in the model's cache.
#pragma once
#include <functional>
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
    // By the probability softmax(logits / temperature) among those that `sampling` leaves; u in (0,1) is a place in their
    // sum, the likeliest first. Ties go to the lower id.
    int32_t pick(std::span<const float> logits, const Sampling& sampling, double u);

  private:
    void sort(std::span<const float> logits, size_t count, size_t among);
    std::vector<int32_t> best;  // ids; the first `sorted` of them are the likeliest, in order
    size_t sorted = 0;
};

// `count` tokens that follow the prompt, of at least one token. The model sees at most its last seq_len tokens: up to the
// cache's length by the cache, then by a pass over all of them for each token. between: called after each token.
std::vector<int32_t> generate(Model& model, std::vector<int32_t> prompt, int64_t count,
                              const Sampling& sampling, const std::function<void()>& between = {});

struct Ending {
    int64_t count;                    // tokens at most
    std::vector<int32_t> stops = {};  // a sequence ends with the first of these, which belongs to it
};
// Tokens that follow each of the prompts, as many of which as the cache takes are gone on with at a time. sampling.step
// is the first prompt's, those after it have the next ones: what a prompt gets does not depend on the others, but for
// rounding. made: called with each token in turn, by its prompt; where it returns false, the prompt's sequence ends.
// Throws Error for a prompt that is empty, or longer with `count` tokens than the cache.
std::vector<std::vector<int32_t>> generate_all(
    Model& model, const std::vector<std::vector<int32_t>>& prompts, const Ending& ending, Sampling sampling,
    const std::function<bool(size_t prompt, int32_t token)>& made = {});

}  // namespace llamac
