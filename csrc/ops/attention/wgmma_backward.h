// Shared by the two files of Hopper's backward pass.
#pragma once
#include "ops/attention/attention.h"
#include "ops/attention/wgmma.h"

#if defined(LLAMAC_WARPGROUPS)
namespace llamac {

// lse * log2 e and delta, f32[B,NH,padded]: infinity and 0 for queries that do not exist.
struct Statistics {
    const float *lse, *delta;
    int64_t padded;
};

constexpr int keys_per_turn = 128;
// Whether wgmma_backward_turns.hip computes a call with heads of 64 or 128: of queries that see all keys, up to their own where
// causal. Queries then may begin after some blocks of keys, as those of a piece of a sequence do.
inline bool takes_turns(int64_t queries, int64_t keys, bool has_first, bool has_ends, bool causal,
                        int64_t window) {
    if (has_first || (window > 0 && window < keys)) return false;
    return causal ? (keys - queries) % keys_per_turn == 0 : !has_ends && keys == queries;
}
// workspace: behind the statistics.
template <class E>
void attention_backward_wgmma_turns(View<E, 4> dq, View<E, 4> dk, View<E, 4> dv, View<const E, 4> dout,
                                    View<const E, 4> q, View<const E, 4> k, View<const E, 4> v,
                                    const Statistics& statistics, float scale, bool causal, void* workspace,
                                    hipStream_t stream);
int64_t attention_backward_wgmma_turns_bytes(int64_t queries, int64_t HD);  // of all heads and batches

}  // namespace llamac
#endif
