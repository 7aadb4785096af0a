// The keys and values of the tokens that a model has processed, from which it continues their sequences.
#pragma once
#include <span>
#include <vector>

#include "core/arena.h"
#include "model/config.h"

namespace llamac {

struct Model;

// Of at most so many sequences and positions.
struct CacheSize {
    int64_t sequences = 0, positions = 0;
};

// All sequences end at the same position, `end`: a shorter one begins later. Their rotary positions begin at 0.
struct KvCache {
    CacheSize size;
    std::vector<Tensor> blocks;   // [sequences, positions, 2*NKV, HD]: keys after RoPE, then values
    Tensor cis;                   // [positions, HD/2, 2]
    Tensor next_cis;              // [sequences, HD/2, 2]: of each sequence's next position
    Tensor first;                 // i32 [sequences, 1]
    std::vector<int32_t> begins;  // of each sequence of the batch; the same as first
    int64_t end = 0;
};

void plan_cache(KvCache& cache, const Config& config, CacheSize size, DType dtype, Arena& arena);

// Where the rows of a pass stand: T tokens of one sequence, or one token of each.
struct CachedRows {
    KvCache* cache;
    int64_t sequence, begin, position,
        end;            // of the keys: from `begin` to `end`; the rows' own begin at `position`
    Tensor cis, first;  // of the rows; first has no data where all keys count
};

// In a dry run: the largest passes, which ask for the most memory to work in.
void try_cache(Model& model);

// Begins anew: sequences of these lengths, of which nothing is there yet.
void begin_sequences(Model& model, std::span<const int64_t> lengths);
// The tokens of one sequence, which are as many as were said; logits: of the token that follows, [V].
void read_prompt(Model& model, int64_t sequence, std::span<const int32_t> tokens, std::vector<float>& logits);
// One token more of each sequence, after all prompts; logits [sequences, V].
void read_tokens(Model& model, std::span<const int32_t> tokens, std::vector<float>& logits);

}  // namespace llamac
