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
void attention_backward_wgmma_turns(View<bf16, 4> dq, View<bf16, 4> dk, View<bf16, 4> dv,
                                    View<const bf16, 4> dout, View<const bf16, 4> q, View<const bf16, 4> k,
                                    View<const bf16, 4> v, const Statistics& statistics, float scale,
                                    bool causal, void* workspace, hipStream_t stream);
int64_t attention_backward_wgmma_turns_bytes(int64_t queries, int64_t HD);  // of all heads and batches

}  // namespace llamac
#endif
