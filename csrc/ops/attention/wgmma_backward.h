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

// wgmma_backward_turns.hip: calls without masks but, perhaps, the diagonal, heads of 64 or 128. workspace: behind the statistics.
template <class E>
void attention_backward_wgmma_turns(View<E, 4> dq, View<E, 4> dk, View<E, 4> dv, View<const E, 4> dout,
                                    View<const E, 4> q, View<const E, 4> k, View<const E, 4> v,
                                    const Statistics& statistics, float scale, bool causal, void* workspace,
                                    hipStream_t stream);
int64_t attention_backward_wgmma_turns_bytes(int64_t queries, int64_t HD);  // of all heads and batches

}  // namespace llamac
#endif
