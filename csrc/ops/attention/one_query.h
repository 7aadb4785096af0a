// Attention of one query head on the host, to keys and values where they lie: packing them, as the `cpu` variant of
// attention.hip does for a tile of queries, would cost more than the products.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "core/scratch.h"
#include "core/simd.h"
#include "core/tensor.h"

namespace llamac::one_query {

// Products: fewer take less time than waking the threads.
[[maybe_unused]] constexpr int64_t least_shared = int64_t{1} << 16;
constexpr int64_t value_rows = 64;  // of a partial sum: a long chain of additions is less exact

inline float power(float x) {
    return fast_exp(x);
}
inline double power(double x) {
    return std::exp(x);
}

// Products of q with four keys at a time hide the latency of an addition.
template <class A, class T>
void four_dots(const A* q, const T* k, int64_t stride, int64_t HD, A* dots) {
    const T *k0 = k, *k1 = k0 + stride, *k2 = k1 + stride, *k3 = k2 + stride;
    A s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t d = 0; d < HD; d++) {
        s0 += q[d] * A(k0[d]);
        s1 += q[d] * A(k1[d]);
        s2 += q[d] * A(k2[d]);
        s3 += q[d] * A(k3[d]);
    }
    dots[0] = s0, dots[1] = s1, dots[2] = s2, dots[3] = s3;
}
template <class A, class T>
A dot(const A* q, const T* k, int64_t HD) {
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < HD; d++) sum += q[d] * A(k[d]);
    return sum;
}

// The keys and values of one head that a query sees.
template <class T>
struct Seen {
    const T *k, *v;
    int64_t k_stride, v_stride, count, HD;
};

// Makes scores e^(score - largest) and returns the largest and the sum of the powers.
template <class A>
std::pair<A, A> softmax(A* scores, int64_t count) {
    A largest = -std::numeric_limits<A>::infinity(), sum = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t s = 0; s < count; s++) largest = std::max(largest, scores[s]);
#pragma omp simd
    for (int64_t s = 0; s < count; s++) scores[s] = power(scores[s] - largest);
    for (int64_t begin = 0; begin < count; begin += value_rows) {
        A part = 0;
#pragma omp simd reduction(+ : part)
        for (int64_t s = begin; s < std::min(count, begin + value_rows); s++) part += scores[s];
        sum += part;
    }
    return {largest, sum};
}

// total[HD] = sum_s p[s] * v[s]; part[HD]: scratch.
template <class A, class T>
void weighted_sum(const Seen<T>& seen, const A* p, A* total, A* part) {
    const int64_t HD = seen.HD;
    std::fill_n(total, HD, A(0));
    for (int64_t begin = 0; begin < seen.count; begin += value_rows) {
        std::fill_n(part, HD, A(0));
        const int64_t end = std::min(seen.count, begin + value_rows);
        int64_t s = begin;
        for (; s + 4 <= end; s += 4) {  // the part passes through memory once for four rows
            const T *v0 = seen.v + s * seen.v_stride, *v1 = v0 + seen.v_stride, *v2 = v1 + seen.v_stride;
            const T* v3 = v2 + seen.v_stride;
            const A p0 = p[s], p1 = p[s + 1], p2 = p[s + 2], p3 = p[s + 3];
#pragma omp simd
            for (int64_t d = 0; d < HD; d++)
                part[d] += (p0 * A(v0[d]) + p1 * A(v1[d])) + (p2 * A(v2[d]) + p3 * A(v3[d]));
        }
        for (; s < end; s++) {
            const T* v = seen.v + s * seen.v_stride;
#pragma omp simd
            for (int64_t d = 0; d < HD; d++) part[d] += p[s] * A(v[d]);
        }
#pragma omp simd
        for (int64_t d = 0; d < HD; d++) total[d] += part[d];
    }
}

// One query head. Returns its lse. scratch: count + 3 * HD.
template <class A, class T, class Q>
A attend(T* out, const Q* query, const Seen<T>& seen, A scale, A* scratch) {
    const int64_t HD = seen.HD;
    A *q = scratch, *total = q + HD, *part = total + HD, *scores = part + HD;
    for (int64_t d = 0; d < HD; d++) q[d] = A(query[d]);
    int64_t s = 0;
    for (; s + 4 <= seen.count; s += 4)
        four_dots(q, seen.k + s * seen.k_stride, seen.k_stride, HD, scores + s);
    for (; s < seen.count; s++) scores[s] = dot(q, seen.k + s * seen.k_stride, HD);
    for (s = 0; s < seen.count; s++) scores[s] *= scale;
    const auto [largest, sum] = softmax(scores, seen.count);
    weighted_sum(seen, scores, total, part);
    for (int64_t d = 0; d < HD; d++) out[d] = T(total[d] / sum);
    return largest + std::log(sum);
}

// Memory for attend() to `keys` keys, kept by the thread; it grows rarely.
template <class A>
A* scratch_of(int64_t keys, int64_t HD) {
    static thread_local Scratch own;
    return own.reserve<A>(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(keys))) + 3 * HD);
}

}  // namespace llamac::one_query
