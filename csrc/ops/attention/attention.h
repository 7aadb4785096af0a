// Shared by the variants of attention: the keys that a query sees, and the launchers of variants in files of their own.
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
// Whether each query sees all keys, up to its own where causal, of as many keys as queries.
bool is_plain(const Call& call), is_plain_causal(const Call& call);

// cpu.hip
template <class T>
void attention_forward_cpu(View<T, 4> out, View<arithmetic<T>, 3> lse, View<const T, 4> q, View<const T, 4> k,
                           View<const T, 4> v, View<const int32_t, 2> first, View<const int32_t, 2> ends,
                           double scale, bool causal, int64_t window);
template <class T>
void attention_backward_cpu(View<T, 4> dq, View<T, 4> dk, View<T, 4> dv, View<const T, 4> dout,
                            View<const T, 4> out, View<const arithmetic<T>, 3> lse, View<const T, 4> q,
                            View<const T, 4> k, View<const T, 4> v, View<const int32_t, 2> first,
                            View<const int32_t, 2> ends, double scale, bool causal, int64_t window);

// one_query.hip
template <class T>
void attention_forward_one_query(View<T, 4> out, View<arithmetic<T>, 3> lse, View<const T, 4> q,
                                 View<const T, 4> k, View<const T, 4> v, View<const int32_t, 2> first,
                                 View<const int32_t, 2> ends, double scale, bool causal, int64_t window);
bool one_query_supports(const Call& call);

// naive.hip
template <class T>
void attention_forward_naive(View<T, 4> out, View<float, 3> lse, View<const T, 4> q, View<const T, 4> k,
                             View<const T, 4> v, View<const int32_t, 2> first, View<const int32_t, 2> ends,
                             double scale, bool causal, int64_t window, LaunchContext context);
template <class T>
void attention_backward_naive(View<T, 4> dq, View<T, 4> dk, View<T, 4> dv, View<const T, 4> dout,
                              View<const T, 4> out, View<const float, 3> lse, View<const T, 4> q,
                              View<const T, 4> k, View<const T, 4> v, View<const int32_t, 2> first,
                              View<const int32_t, 2> ends, double scale, bool causal, int64_t window,
                              LaunchContext context);
int64_t attention_forward_naive_workspace(const Call& call);
int64_t attention_backward_naive_workspace(const Call& call);

using WorkspaceBytes = int64_t(const Call& call);

// flash_forward.hip, flash_backward.hip
bool flash_supports(const Call& call), plain_flash_supports(const Call& call);
template <class E>
void attention_forward_flash(View<E, 4> out, View<float, 3> lse, View<const E, 4> q, View<const E, 4> k,
                             View<const E, 4> v, View<const int32_t, 2> first, View<const int32_t, 2> ends,
                             double scale, bool causal, int64_t window, LaunchContext context);
template <class E>
void attention_backward_flash(View<E, 4> dq, View<E, 4> dk, View<E, 4> dv, View<const E, 4> dout,
                              View<const E, 4> out, View<const float, 3> lse, View<const E, 4> q,
                              View<const E, 4> k, View<const E, 4> v, View<const int32_t, 2> first,
                              View<const int32_t, 2> ends, double scale, bool causal, int64_t window,
                              LaunchContext context);
template <class E>
void attention_backward_flash_atomic(View<E, 4> dq, View<E, 4> dk, View<E, 4> dv, View<const E, 4> dout,
                                     View<const E, 4> out, View<const float, 3> lse, View<const E, 4> q,
                                     View<const E, 4> k, View<const E, 4> v, View<const int32_t, 2> first,
                                     View<const int32_t, 2> ends, double scale, bool causal, int64_t window,
                                     LaunchContext context);
WorkspaceBytes attention_backward_flash_workspace, attention_backward_flash_atomic_workspace;

// mfma_forward.hip, mfma_backward.hip; where LLAMAC_MFMA
bool mfma_supports(const Call& call);
int64_t attention_backward_mfma_workspace(const Call& call);
template <class E>
void attention_backward_mfma(View<E, 4> dq, View<E, 4> dk, View<E, 4> dv, View<const E, 4> dout,
                             View<const E, 4> out, View<const float, 3> lse, View<const E, 4> q,
                             View<const E, 4> k, View<const E, 4> v, View<const int32_t, 2> first,
                             View<const int32_t, 2> ends, double scale, bool causal, int64_t window,
                             LaunchContext context);
template <class E>
void attention_forward_mfma(View<E, 4> out, View<float, 3> lse, View<const E, 4> q, View<const E, 4> k,
                            View<const E, 4> v, View<const int32_t, 2> first, View<const int32_t, 2> ends,
                            double scale, bool causal, int64_t window, LaunchContext context);

// wgmma_forward.hip, wgmma_backward.hip; where LLAMAC_WARPGROUPS
bool wgmma_supports(const Call& call);
template <class E>
void attention_forward_wgmma(View<E, 4> out, View<float, 3> lse, View<const E, 4> q, View<const E, 4> k,
                             View<const E, 4> v, View<const int32_t, 2> first, View<const int32_t, 2> ends,
                             double scale, bool causal, int64_t window, LaunchContext context);
template <class E>
void attention_backward_wgmma(View<E, 4> dq, View<E, 4> dk, View<E, 4> dv, View<const E, 4> dout,
                              View<const E, 4> out, View<const float, 3> lse, View<const E, 4> q,
                              View<const E, 4> k, View<const E, 4> v, View<const int32_t, 2> first,
                              View<const int32_t, 2> ends, double scale, bool causal, int64_t window,
                              LaunchContext context);
WorkspaceBytes attention_forward_wgmma_workspace, attention_backward_wgmma_workspace;

}  // namespace llamac
