// The keys and values of the tokens that a model has processed, from which it continues their sequences.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/arena.h"
#include "core/device_memory.h"
#include "model/parameters.h"
#include "platform/stream.h"

namespace llamac {

struct Model;

// The largest number of sequences, and of positions per sequence.
struct CacheSize {
    int64_t sequences = 0, positions = 0;
};

// All sequences end at the same position, `end`: a shorter one begins later. Their rotary positions begin at 0.
struct KvCache {
    CacheSize size;
    std::vector<Tensor> blocks;  // [sequences, positions, 2*NKV, HD]: keys after RoPE, then values
    Tensor cis;                  // [positions, rotary_size/2, 2]
    // Where RoPE turns some channels of a head: the angles of each sequence's next position [sequences, rotary_size/2, 2], and those
    // by which attention, which turns whole heads, turns none [positions, HD/2, 2].
    Tensor own_cis, unturned;
    // i32 [sequences] and [1]: `begins` and `end` on the device, so that each decode pass has the same launches.
    Tensor first, last;
    std::vector<int32_t> begins;  // of each sequence of the batch
    int64_t end = 0;

    // The decode pass of `sequences` sequences. The first one is launched directly, the next one captured.
    struct Replay {
        int64_t sequences = 0;
        std::optional<Graph> graph;
    } replay;
    // Host memory of passes that are not finished.
    struct PendingPasses {
        static constexpr int64_t count = 2;
        explicit PendingPasses(int64_t sequences) : ends(count), tokens(count * sequences) {}
        PinnedMemory<int32_t> ends, tokens;
        Event done[count];
        int64_t queued = 0, finished = 0;
    };
    std::unique_ptr<PendingPasses> pending;  // since the first pass
};

void plan_cache(KvCache& cache, const Config& config, const Parameters& parameters, CacheSize size,
                DType dtype, Arena& arena);
void set_unturned(const KvCache& cache);

// The place of a pass's rows: the next token of each sequence, or T tokens of one sequence.
struct CachedRows {
    KvCache* cache;
    bool is_decode = false;
    // For T tokens of one sequence: its keys are at positions [begin, end), the rows' own keys at [position, end).
    int64_t sequence = 0, begin = 0, position = 0, end = 0;
    Tensor cis = {};  // of these rows
};

// In a dry run: the largest passes, which ask for the most memory to work in.
void try_cache(Model& model);

// Empties the cache and announces prompts of these lengths.
void begin_sequences(Model& model, std::span<const int64_t> lengths);
// Prefills one sequence, whole on each rank, with the length announced in begin_sequences(). logits [V]: of the next token.
void prefill(Model& model, int64_t sequence, std::span<const int32_t> tokens, std::vector<float>& logits);
// The next token of each sequence, after all prompts; logits [sequences, V].
void decode(Model& model, std::span<const int32_t> tokens, std::vector<float>& logits);

// The same for the argmax of each sequence's logits, which stays on the device. Enqueues the pass and does not wait. tokens: one per
// sequence; empty: the argmax of the last pass, also before the host has read it. At most PendingPasses::count passes may be
// pending; each needs one call of the function below, which waits for it.
void queue_argmax(Model& model, std::span<const int32_t> tokens = {});
void finish_argmax(Model& model, std::span<int32_t> found);

}  // namespace llamac
