// The rotation as rope.hip, rope_quantize.hip and qk_norm_rope.hip compute it, with the same bits: the reference, a head on the
// host, and a channel in a kernel. rope.hip has the mathematics.
#pragma once
#include "core/device.h"
#include "core/operation.h"
#include "core/simd.h"

namespace llamac {

// direction: 1 forward, -1 backward.
template <class T, int direction>
void rope_reference(View<T, 4> out, View<const T, 4> x, View<const arithmetic<T>, 3> cis, bool interleaved) {
    using A = arithmetic<T>;
    const int64_t B = x.shape[0], time = x.shape[1], NH = x.shape[2], half = x.shape[3] / 2;
    for (int64_t b = 0; b < B; b++)
        for (int64_t t = 0; t < time; t++)
            for (int64_t h = 0; h < NH; h++)
                for (int64_t j = 0; j < half; j++) {
                    const int64_t i0 = interleaved ? 2 * j : j, i1 = interleaved ? 2 * j + 1 : j + half;
                    const A x0 = A(x(b, t, h, i0)), x1 = A(x(b, t, h, i1));
                    const A c = cis(t, j, 0), s = direction * cis(t, j, 1);
                    out(b, t, h, i0) = T(x0 * c - x1 * s);
                    out(b, t, h, i1) = T(x1 * c + x0 * s);
                }
}

// Cosines and sines of a position as vectors.
template <int direction>
void split_angles(const float* cis, float* cosines, float* sines, int64_t half) {
    for (int64_t j = 0; j < half; j++) {
        cosines[j] = cis[2 * j];
        sines[j] = direction * cis[2 * j + 1];
    }
}

// Not inlined, so that all callers compute the same bits: inlined, a loop would be compiled for each.
template <class T>
[[gnu::noinline]] void rotate_half_split(T* out, const T* x, const float* c, const float* s, int64_t half) {
#pragma omp simd
    for (int64_t j = 0; j < half; j++) {
        const float x0 = float(x[j]), x1 = float(x[j + half]);
        store(out + j, x0 * c[j] - x1 * s[j]);
        store(out + j + half, x1 * c[j] + x0 * s[j]);
    }
}

// A channel in a kernel: from itself, the other of its pair, and the angle; s is -sin for the first channel of a pair in the
// forward direction, and for the second in the backward one. One rounding order for all compilers: the kernels agree.
__device__ inline float rotated(float own, float other, float c, float s) {
    return fmaf(own, c, other * s);
}

inline bool has_few_heads(const Call& call) {
    return call["B"] * call["T"] < (int64_t{1} << 31) / call["NH"];
}

}  // namespace llamac
