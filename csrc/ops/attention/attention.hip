// Causal self-attention with grouped queries (Vaswani et al. 2017; Ainslie et al. 2023). Query head h reads
// key/value head h / (NH/NKV). For each b, h and query t, over the keys s <= t:
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
//   dk[s,d] = scale * sum_{h,t} ds[s] * q[t,d]     over the query heads that read this key head
//   dv[s,d] = sum_{h,t} p[s] * dout[t,d]
//
// reference:    plain loops.
// cpu:          a tile of queries against all keys before its last: scores of the tile are whole rows, so softmax
//               is one pass and memory is linear in T; register tiles above the diagonal are skipped. Keys and
//               values are packed once for all query heads that share them.
// naive:        the formulas, one kernel each, whole scores in memory (naive.hip).
// flash:        tiles on any device's matrix cores, scores never in memory (flash_forward.hip,
//               flash_backward.hip).
// flash_atomic: backward in one pass, dq by atomic adds: not deterministic (flash_backward.hip).
// wgmma:        as flash, with Hopper's own instructions (wgmma_forward.hip, wgmma_backward.hip).
// wgmma_atomic: as flash_atomic, with Hopper's own instructions (wgmma_backward.hip).
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
                                 View<const T, 4> k, View<const T, 4> v, double scale) {
    using A = arithmetic<T>;
    const int64_t B = q.shape[0], time = q.shape[1], NH = q.shape[2], HD = q.shape[3],
                  group = NH / k.shape[2];
    std::vector<A> p(time), row(HD);
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < NH; h++)
            for (int64_t t = 0; t < time; t++) {
                A largest = -std::numeric_limits<A>::infinity(), sum = 0;
                for (int64_t s = 0; s <= t; s++) {
                    A dot = 0;
                    for (int64_t d = 0; d < HD; d++) dot += A(q(b, t, h, d)) * A(k(b, s, h / group, d));
                    p[s] = A(scale) * dot;
                    largest = std::max(largest, p[s]);
                }
                for (int64_t s = 0; s <= t; s++) sum += p[s] = std::exp(p[s] - largest);
                std::fill(row.begin(), row.end(), A(0));
                for (int64_t s = 0; s <= t; s++)
                    for (int64_t d = 0; d < HD; d++) row[d] += p[s] * A(v(b, s, h / group, d));
                for (int64_t d = 0; d < HD; d++) out(b, t, h, d) = T(row[d] / sum);
                lse(b, h, t) = largest + std::log(sum);
            }
}

template <class T>
void attention_backward_reference(View<T, 4> dq, View<T, 4> dk, View<T, 4> dv, View<const T, 4> dout,
                                  View<const T, 4> out, View<const arithmetic<T>, 3> lse, View<const T, 4> q,
                                  View<const T, 4> k, View<const T, 4> v, double scale) {
    using A = arithmetic<T>;
    const int64_t B = q.shape[0], time = q.shape[1], NH = q.shape[2], HD = q.shape[3], NKV = k.shape[2],
                  group = NH / NKV;
    // Of one key/value head: the sums over its query heads, and of one query head.
    std::vector<A> keys(time * HD), values(time * HD), keys_part(time * HD), values_part(time * HD), row(HD);
    const auto backward_query = [&](int64_t b, int64_t h, int64_t t) {
        const int64_t g = h / group;
        A delta = 0;
        for (int64_t d = 0; d < HD; d++) delta += A(dout(b, t, h, d)) * A(out(b, t, h, d));
        std::fill(row.begin(), row.end(), A(0));
        for (int64_t s = 0; s <= t; s++) {
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
                for (int64_t t = 0; t < time; t++) backward_query(b, h, t);
                for (int64_t i = 0; i < time * HD; i++) keys[i] += keys_part[i], values[i] += values_part[i];
            }
            for (int64_t s = 0; s < time; s++)
                for (int64_t d = 0; d < HD; d++) {
                    dk(b, s, g, d) = T(keys[s * HD + d]);
                    dv(b, s, g, d) = T(values[s * HD + d]);
                }
        }
}

// The tests stand beside the kernels.
constexpr const char* limits =
    "HD 64 or 128, T at most 2^30, scale above 0, heads that begin at multiples of 16 bytes";
constexpr Constraints flash_constraints{limits, flash_supports};
#if defined(LLAMAC_WARPGROUPS)
constexpr Constraints wgmma_constraints{limits, wgmma_supports};
constexpr const char* hopper = "NVIDIA sm_90";
#endif

// Only the causal half counts: T(T+1)/2 pairs of query and key.
double forward_flops(const Call& call) {
    const double pairs = 0.5 * static_cast<double>(call["T"]) * static_cast<double>(call["T"] + 1);
    return 2 * 2 * static_cast<double>(call["B"] * call["NH"] * call["HD"]) * pairs;
}
// Five products instead of two.
double backward_flops(const Call& call) {
    return 2.5 * forward_flops(call);
}

// What tiles want to see: one row, whole tiles, one row less and more, several tiles, long rows.
#define LLAMAC_ATTENTION_TESTS                                                                  \
    " test(B=1, T=1, NH=8, NKV=1, HD=128) test(B=2, T=64, NH=4, NKV=1, HD=64)"                  \
    " test(B=1, T=63, NH=4, NKV=2, HD=128) test(B=1, T=129, NH=3, NKV=3, HD=128)"               \
    " test(B=1, T=200, NH=8, NKV=2, HD=64) test(B=1, T=520, NH=2, NKV=1, HD=128)"               \
    " test_large(B=1, T=1000, NH=4, NKV=1, HD=64) test_large(B=1, T=4096, NH=1, NKV=1, HD=128)" \
    " test_large(B=1, T=4096, NH=2, NKV=1, HD=64)"

Operation attention_forward(
    "attention_forward<T: f32 bf16 f64, A: arithmetic(T)>"
    "(out: T[B,T,NH,HD] strided, lse: A[B,NH,T]; q: T[B,T,NH,HD] strided,"
    " k: T[B,T,NKV,HD] strided, v: T[B,T,NKV,HD] strided; scale: float {0.125, 0.3, 4})"
    " empty(B, T) multiple(NH, NKV)"
    " derivative attention_backward(dq: grad q, dk: grad k, dv: grad v; dout: grad out, out, lse, q, k, v; "
    "scale)" LLAMAC_ATTENTION_TESTS,
    "out = causal softmax(scale * q * transposed k) * v",
    {{"cpu", "query tiles, packed keys, whole rows of scores", Backend::host,
      instantiations<attention_forward_cpu<float>, attention_forward_cpu<bf16>,
                     attention_forward_cpu<double>>()},
#if defined(LLAMAC_WARPGROUPS)
     {.name = "wgmma",
      .idea = "as flash, with wgmma, TMA, warps that copy and warps that compute",
      .backend = Backend::device,
      .instantiations = instantiations<attention_forward_wgmma>(),
      .supports = wgmma_constraints,
      .chip = hopper},
#endif
     {"flash", "tiles on matrix cores, running softmax, 128-bit accesses", Backend::device,
      instantiations<attention_forward_flash>(), flash_constraints},
     {"naive",
      "repeated keys and values, whole scores in memory",
      Backend::device,
      instantiations<attention_forward_naive<float>, attention_forward_naive<bf16>>(),
      nullptr,
      {256},
      attention_forward_naive_workspace},
     {"reference", "plain loops", Backend::host,
      instantiations<attention_forward_reference<float>, attention_forward_reference<bf16>,
                     attention_forward_reference<double>>()}},
    forward_flops);

Operation attention_backward(
    "attention_backward<T: f32 bf16 f64, A: arithmetic(T)>"
    "(dq: T[B,T,NH,HD] strided, dk: T[B,T,NKV,HD] strided, dv: T[B,T,NKV,HD] strided;"
    " dout: T[B,T,NH,HD] strided, out: T[B,T,NH,HD] strided, lse: A[B,NH,T], q: T[B,T,NH,HD] strided,"
    " k: T[B,T,NKV,HD] strided, v: T[B,T,NKV,HD] strided; scale: float {0.125, 0.3, 4})"
    " empty(B, T) multiple(NH, NKV)" LLAMAC_ATTENTION_TESTS,
    "gradients of attention_forward",
    {{"cpu", "query tiles, p from lse, dk and dv summed by owners", Backend::host,
      instantiations<attention_backward_cpu<float>, attention_backward_cpu<bf16>,
                     attention_backward_cpu<double>>()},
#if defined(LLAMAC_WARPGROUPS)
     {.name = "wgmma",
      .idea = "as flash, with wgmma, TMA, warps that copy and warps that compute",
      .backend = Backend::device,
      .instantiations = instantiations<attention_backward_wgmma>(),
      .supports = wgmma_constraints,
      .workspace = attention_backward_wgmma_workspace,
      .chip = hopper},
     {.name = "wgmma_atomic",
      .idea = "as wgmma, in one pass, dq by atomic adds",
      .backend = Backend::device,
      .instantiations = instantiations<attention_backward_wgmma_atomic>(),
      .supports = wgmma_constraints,
      .workspace = attention_backward_wgmma_atomic_workspace,
      .deterministic = false,
      .chip = hopper},
#endif
     {.name = "flash",
      .idea = "tiles on matrix cores, p made again from lse, 128-bit accesses",
      .backend = Backend::device,
      .instantiations = instantiations<attention_backward_flash>(),
      .supports = flash_constraints,
      .workspace = attention_backward_flash_workspace},
     {.name = "flash_atomic",
      .idea = "as flash on matrix cores, in one pass, dq by 128-bit atomic adds",
      .backend = Backend::device,
      .instantiations = instantiations<attention_backward_flash_atomic>(),
      .supports = flash_constraints,
      .workspace = attention_backward_flash_atomic_workspace,
      .deterministic = false},
     {"naive",
      "repeated keys and values, whole p and ds in memory",
      Backend::device,
      instantiations<attention_backward_naive<float>, attention_backward_naive<bf16>>(),
      nullptr,
      {256},
      attention_backward_naive_workspace},
     {"reference", "plain loops", Backend::host,
      instantiations<attention_backward_reference<float>, attention_backward_reference<bf16>,
                     attention_backward_reference<double>>()}},
    backward_flops);

}  // namespace
}  // namespace llamac
