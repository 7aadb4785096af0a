// Attention with grouped queries (Vaswani et al. 2017; Ainslie et al. 2023). Query head h reads key/value head
// h / (NH/NKV). The T queries stand at the last of the S positions, as with keys that a cache keeps: query t at position
// S - T + t, which makes the causal mask that of FlashAttention and PyTorch's lower right corner. It sees the keys s in
//
//   s <= S - T + t              where causal; T is then at most S
//   s >= first[b,t]             where first is given: the first position of its document. Along a sequence first
//                               never falls, and it is at most the query's own position. RoPE makes scores depend
//                               on distances alone, so that positions need not begin anew with a document
//   s <  end[b,t]               where end is given, as for documents of an encoder; along a sequence end never
//                               falls, and it is behind the query's own position: where causal it says nothing
//   s >  S - T + t - window     where window is not 0: the last `window` positions, its own among them
//
// For each b, h and query t, over these keys:
//
//   score[s] = scale * sum_d q[t,d] * k[s,d]
//   lse      = ln sum_s exp(score[s])
//   p[s]     = exp(score[s] - lse)
//   out[t,d] = sum_s p[s] * v[s,d]
//
// Backward, with p made again from lse, and delta = sum_d dout[t,d] * out[t,d] = sum_s p[s] * dp[s]:
//
//   dp[s]   = sum_d dout[t,d] * v[s,d]
//   ds[s]   = p[s] * (dp[s] - delta)
//   dq[t,d] = scale * sum_s ds[s] * k[s,d]
//   dk[s,d] = scale * sum_{h,t} ds[s] * q[t,d]     over the queries that see it, of the heads that read its head
//   dv[s,d] = sum_{h,t} p[s] * dout[t,d]
//
// reference:    plain loops.
// cpu:          a tile of queries against all keys that one of them sees: scores of the tile are whole rows, so
//               softmax is one pass and memory is linear in T; register tiles that nothing sees are skipped. Keys
//               and values are packed once for all query heads that share them.
// one_query:    forward, of one query per head: keys and values are read where they lie (one_query.hip).
// naive:        the formulas, one kernel each, whole scores in memory (naive.hip).
// flash:        tiles on any device's matrix cores, scores never in memory (flash_forward.hip,
//               flash_backward.hip).
// mfma:         as flash, in MI300X's shape (mfma_forward.hip).
// wgmma:        as flash, with Hopper's own instructions (wgmma_forward.hip, wgmma_backward.hip).
//
// Measured: docs/benchmarks/nvidia-h200.md, docs/benchmarks/cpu.md.
#include "ops/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace llamac {
namespace {

template <class T>
void attention_forward_reference(View<T, 4> out, View<arithmetic<T>, 3> lse, View<const T, 4> q,
                                 View<const T, 4> k, View<const T, 4> v, View<const int32_t, 2> first,
                                 View<const int32_t, 2> ends, double scale, bool causal, int64_t window) {
    using A = arithmetic<T>;
    const int64_t B = q.shape[0], NH = q.shape[2], HD = q.shape[3], group = NH / k.shape[2];
    const AttentionMask visible(q, k, first, ends, causal, window);
    std::vector<A> p(k.shape[1]), row(HD);
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < NH; h++)
            for (int64_t t = 0; t < q.shape[1]; t++) {
                const int64_t begin = visible.begin(b, t), end = visible.end(b, t);
                A largest = -std::numeric_limits<A>::infinity(), sum = 0;
                for (int64_t s = begin; s < end; s++) {
                    A dot = 0;
                    for (int64_t d = 0; d < HD; d++) dot += A(q(b, t, h, d)) * A(k(b, s, h / group, d));
                    p[s] = A(scale) * dot;
                    largest = std::max(largest, p[s]);
                }
                for (int64_t s = begin; s < end; s++) sum += p[s] = std::exp(p[s] - largest);
                std::fill(row.begin(), row.end(), A(0));
                for (int64_t s = begin; s < end; s++)
                    for (int64_t d = 0; d < HD; d++) row[d] += p[s] * A(v(b, s, h / group, d));
                for (int64_t d = 0; d < HD; d++) out(b, t, h, d) = T(row[d] / sum);
                lse(b, h, t) = largest + std::log(sum);
            }
}

template <class T>
void attention_backward_reference(View<T, 4> dq, View<T, 4> dk, View<T, 4> dv, View<const T, 4> dout,
                                  View<const T, 4> out, View<const arithmetic<T>, 3> lse, View<const T, 4> q,
                                  View<const T, 4> k, View<const T, 4> v, View<const int32_t, 2> first,
                                  View<const int32_t, 2> ends, double scale, bool causal, int64_t window) {
    using A = arithmetic<T>;
    const int64_t B = q.shape[0], NH = q.shape[2], HD = q.shape[3], S = k.shape[1], NKV = k.shape[2],
                  group = NH / NKV;
    const AttentionMask visible(q, k, first, ends, causal, window);
    // The sums of one key/value head over its query heads, and those of one query head.
    std::vector<A> keys(S * HD), values(S * HD), keys_part(S * HD), values_part(S * HD), row(HD);
    const auto backward_query = [&](int64_t b, int64_t h, int64_t t) {
        const int64_t g = h / group;
        A delta = 0;
        for (int64_t d = 0; d < HD; d++) delta += A(dout(b, t, h, d)) * A(out(b, t, h, d));
        std::fill(row.begin(), row.end(), A(0));
        for (int64_t s = visible.begin(b, t); s < visible.end(b, t); s++) {
            A dot = 0, dp = 0;
            for (int64_t d = 0; d < HD; d++) {
                dot += A(q(b, t, h, d)) * A(k(b, s, g, d));
                dp += A(dout(b, t, h, d)) * A(v(b, s, g, d));
            }
            const A p = std::exp(A(scale) * dot - lse(b, h, t)), ds = A(scale) * p * (dp - delta);
            for (int64_t d = 0; d < HD; d++) {
                row[d] += ds * A(k(b, s, g, d));
                keys_part[s * HD + d] += ds * A(q(b, t, h, d));
                values_part[s * HD + d] += p * A(dout(b, t, h, d));
            }
        }
        for (int64_t d = 0; d < HD; d++) dq(b, t, h, d) = T(row[d]);
    };
    for (int64_t b = 0; b < B; b++)
        for (int64_t g = 0; g < NKV; g++) {
            std::fill(keys.begin(), keys.end(), A(0));
            std::fill(values.begin(), values.end(), A(0));
            for (int64_t h = g * group; h < (g + 1) * group; h++) {
                std::fill(keys_part.begin(), keys_part.end(), A(0));
                std::fill(values_part.begin(), values_part.end(), A(0));
                for (int64_t t = 0; t < q.shape[1]; t++) backward_query(b, h, t);
                for (int64_t i = 0; i < S * HD; i++) keys[i] += keys_part[i], values[i] += values_part[i];
            }
            for (int64_t s = 0; s < S; s++)
                for (int64_t d = 0; d < HD; d++) {
                    dk(b, s, g, d) = T(keys[s * HD + d]);
                    dv(b, s, g, d) = T(values[s * HD + d]);
                }
        }
}

// 1 + 2 + ... + n.
double sum_to(double n) {
    return n > 0 ? 0.5 * n * (n + 1) : 0;
}
// The pairs of a query and a key that it sees: T(T+1)/2 of plain causal attention. An upper bound with `first`, whose
// values are in the device's memory.
double forward_flops(const Call& call) {
    const double T = static_cast<double>(call["T"]), S = static_cast<double>(call["S"]),
                 window = call.number("window");
    double pairs = call.number("causal") ? sum_to(S) - sum_to(S - T) : T * S;
    if (window > 0) pairs -= sum_to(S - window) - sum_to(S - T - window);
    return 2 * 2 * static_cast<double>(call["B"] * call["NH"] * call["HD"]) * pairs;
}
// Five products instead of two.
double backward_flops(const Call& call) {
    return 2.5 * forward_flops(call);
}

#define LLAMAC_ATTENTION_SCALARS \
    "scale: float {0.125, 0.3, 4}, causal: bool = 1, window: int >=0 = 0 {0, 5, 0, 1, 64, 0, 37}"
// Cases for tiles: one row, whole tiles, one row less and more, several tiles, long rows; fewer queries than keys, and more. A
// case's window goes by its place: 0 for the first three, 64, 37, 5, 1, 0 for three, 64, 37, and so on. Three blocks of 128 keys,
// which take turns with dq, come without a window, as causality alone has other kernels. test_large has no places of its own where
// it is left out, so it comes last.
#define LLAMAC_ATTENTION_TESTS                                                                          \
    " empty(B, T, S) multiple(NH, NKV) at_most(T, S, causal)"                                           \
    " test(B=2, T=257, S=257, NH=2, NKV=1, HD=128) test(B=2, T=64, S=64, NH=4, NKV=1, HD=64)"           \
    " test(B=2, T=290, S=290, NH=4, NKV=2, HD=64) test(B=1, T=129, S=129, NH=3, NKV=3, HD=128)"         \
    " test(B=1, T=200, S=200, NH=8, NKV=2, HD=64) test(B=1, T=520, S=520, NH=2, NKV=1, HD=128)"         \
    " test(B=2, T=1, S=300, NH=4, NKV=1, HD=128) test(B=1, T=65, S=131, NH=4, NKV=2, HD=64)"            \
    " test(B=1, T=65, S=193, NH=4, NKV=2, HD=64)"                                                       \
    " test(B=1, T=140, S=67, NH=2, NKV=2, HD=64) test(B=1, T=63, S=63, NH=4, NKV=2, HD=128)"            \
    " test(B=1, T=1, S=1, NH=8, NKV=1, HD=128)"                                                         \
    " test_large(B=1, T=1000, S=1000, NH=4, NKV=1, HD=64)"                                              \
    " test_large(B=1, T=4096, S=4096, NH=1, NKV=1, HD=128)"                                             \
    " test_large(B=1, T=4096, S=4096, NH=2, NKV=1, HD=64) test_large(B=1, T=513, S=3000, NH=2, NKV=1, " \
    "HD=64) test_large(B=2, T=1000, S=3048, NH=4, NKV=2, HD=128)"

Operation attention_forward(
    "attention_forward<T: f32 bf16 fp16 f64, A: arithmetic(T)>"
    "(out: T[B,T,NH,HD] strided, lse: A[B,NH,T]; q: T[B,T,NH,HD] strided,"
    " k: T[B,S,NKV,HD] strided, v: T[B,S,NKV,HD] strided, first?: i32[B,T] "
    "begins(S), end?: i32[B,T] ends(S);" LLAMAC_ATTENTION_SCALARS
    ") derivative attention_backward(dq: grad q, dk: grad k, dv: grad v; dout: grad out, out, lse, q, k, v, "
    "first, end; scale, causal, window)" LLAMAC_ATTENTION_TESTS,
    "out = softmax(scale * q * transposed k) * v over the keys that a query sees",
    {one_query_attention_forward(),
     cpu_attention_forward(),
#if defined(LLAMAC_WARPGROUPS)
     wgmma_attention_forward(),
#endif
#if defined(LLAMAC_MFMA)
     mfma_attention_forward(),
#endif
     flash_attention_forward(),
     naive_attention_forward(),
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(attention_forward_reference), attention_forward_reference<double>>()}},
    forward_flops);

Operation attention_backward(
    "attention_backward<T: f32 bf16 fp16 f64, A: arithmetic(T)>"
    "(dq: T[B,T,NH,HD] strided, dk: T[B,S,NKV,HD] strided, dv: T[B,S,NKV,HD] strided;"
    " dout: T[B,T,NH,HD] strided, out: T[B,T,NH,HD] strided, lse: A[B,NH,T], q: T[B,T,NH,HD] strided,"
    " k: T[B,S,NKV,HD] strided, v: T[B,S,NKV,HD] strided, first?: i32[B,T] "
    "begins(S), end?: i32[B,T] ends(S);" LLAMAC_ATTENTION_SCALARS ")" LLAMAC_ATTENTION_TESTS,
    "gradients of attention_forward",
    {cpu_attention_backward(),
#if defined(LLAMAC_WARPGROUPS)
     wgmma_attention_backward(),
#endif
#if defined(LLAMAC_MFMA)
     mfma_attention_backward(),
#endif
     flash_attention_backward(),
     naive_attention_backward(),
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(attention_backward_reference), attention_backward_reference<double>>()}},
    backward_flops);

}  // namespace
}  // namespace llamac
