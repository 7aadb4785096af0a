// Shared by the variants of attention: the keys that a query sees, and the variants that have files of their own.
#pragma once
#include "core/operation.h"
#include "platform/cdna3.h"

namespace llamac {

// The keys that a query sees: [begin, end), never empty. Queries have the last positions of the keys.
struct AttentionMask {
    const int32_t *first, *ends;  // [B,T], or null
    int64_t queries, keys, window;
    bool causal;

    template <class T>
    AttentionMask(const View<T, 4>& q, const View<T, 4>& k, const View<const int32_t, 2>& first_,
                  const View<const int32_t, 2>& ends_, bool causal_, int64_t window_)
        : first(first_.data),
          ends(ends_.data),
          queries(q.shape[1]),
          keys(k.shape[1]),
          window(window_),
          causal(causal_) {}

    bool is_plain() const {
        return !first && (causal || !ends) && queries == keys && (window == 0 || window >= keys);
    }
    __host__ __device__ int64_t position(int64_t t) const { return keys - queries + t; }
    // Neither falls from a query to the next.
    __host__ __device__ int64_t begin(int64_t b, int64_t t) const {
        const int64_t own = position(t), given = first ? first[b * queries + t] : 0;
        const int64_t from = given < own ? given : own;  // a device's values are not checked
        const int64_t near = window > 0 ? own - window + 1 : 0, later = from > near ? from : near;
        return later > 0 ? later : 0;
    }
    __host__ __device__ int64_t end(int64_t b, int64_t t) const {
        const int64_t behind_own = position(t) + 1;
        if (causal || !ends) return causal ? behind_own : keys;
        const int64_t given = ends[b * queries + t], some = given > 1 ? given : 1;
        const int64_t seen = some > behind_own ? some : behind_own;
        return seen < keys ? seen : keys;
    }
};

// one_query.hip, cpu.hip, naive.hip
Variant one_query_attention_forward();
Variant cpu_attention_forward(), cpu_attention_backward();
Variant naive_attention_forward(), naive_attention_backward();
// flash_forward.hip, flash_backward.hip
bool flash_supports(const Call& call);
Variant flash_attention_forward(), flash_attention_backward();
// mfma_forward.hip, mfma_backward.hip; where LLAMAC_MFMA
Variant mfma_attention_forward(), mfma_attention_backward();
// wgmma_forward.hip, wgmma_backward.hip; where LLAMAC_WARPGROUPS
Variant wgmma_attention_forward(), wgmma_attention_backward();

}  // namespace llamac
