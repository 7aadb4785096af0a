// SwiGLU as swiglu.hip and swiglu_quantize.hip compute it, with the same bits: references, a row on the host, elements and
// vectors in kernels. swiglu.hip has the mathematics.
#pragma once
#include <cmath>

#include "core/device.h"
#include "core/simd.h"

namespace llamac {

template <class T>
void swiglu_forward_reference(View<T, 2> out, View<const T, 2> gate_up) {
    using A = arithmetic<T>;
    const int64_t N = out.shape[0], F = out.shape[1];
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            const A g = A(gate_up(n, f)), up = A(gate_up(n, F + f));
            out(n, f) = T(g / (1 + std::exp(-g)) * up);
        }
}

template <class T>
void swiglu_backward_reference(View<T, 2> dgate_up, View<T, 2> out, View<const T, 2> dout,
                               View<const T, 2> gate_up) {
    using A = arithmetic<T>;
    const int64_t N = dout.shape[0], F = dout.shape[1];
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            const A g = A(gate_up(n, f)), up = A(gate_up(n, F + f)), d = A(dout(n, f));
            const A s = 1 / (1 + std::exp(-g));
            dgate_up(n, f) = T(d * up * s * (1 + g * (1 - s)));
            dgate_up(n, F + f) = T(d * g * s);
            if (out) out(n, f) = T(g / (1 + std::exp(-g)) * up);
        }
}

// Not inlined, so that all callers compute the same bits: inlined, a loop would be compiled for each.
template <class T>
[[gnu::noinline]] void swiglu_row(T* out, const T* gate, int64_t F) {
    const T* up = gate + F;
#pragma omp simd
    for (int64_t f = 0; f < F; f++) {
        const float g = float(gate[f]);
        store(out + f, g / (1.0f + fast_exp(-g)) * float(up[f]));
    }
}

template <class T>
[[gnu::noinline]] void swiglu_backward_row(T* dgate, const T* dout, const T* gate, int64_t F) {
    const T* up = gate + F;
    T* dup = dgate + F;
#pragma omp simd
    for (int64_t f = 0; f < F; f++) {
        const float g = float(gate[f]), u = float(up[f]), d = float(dout[f]);
        const float s = 1.0f / (1.0f + fast_exp(-g));
        store(dgate + f, d * u * s * (1.0f + g * (1.0f - s)));
        store(dup + f, d * g * s);
    }
}

// ---- kernels

template <class T>
__device__ T swiglu_naive(float g, float up) {
    return T(g / (1.0f + expf(-g)) * up);
}
template <class T>
__device__ void swiglu_backward_naive_element(T* dgate, T* dup, float d, float g, float u) {
    const float s = 1.0f / (1.0f + expf(-g));
    *dgate = T(d * u * s * (1.0f + g * (1.0f - s)));
    *dup = T(d * g * s);
}

// 1 / (1 + e^-g); 0 where e^-g is infinite. The rounding of narrow types hides the error of the fast functions:
// 1e-5 of the value at most, and 0 for a quotient below 2^-126.
template <class T>
__device__ float sigmoid(float g) {
    if constexpr (narrow<T>)
        return fast_reciprocal(1.0f + __expf(-g));  // one instruction; HIP's __fdividef divides
    else
        return 1.0f / (1.0f + expf(-g));
}

// g = silu(g) * u
template <class T, int size>
__device__ void swiglu_vector(float (&g)[size], const float (&u)[size]) {
    for (int i = 0; i < size; i++) g[i] = g[i] * sigmoid<T>(g[i]) * u[i];
}
// g, d: the gradients of gate and up for that of the output, d; u: the output.
template <class T, int size>
__device__ void swiglu_backward_vector(float (&g)[size], float (&u)[size], float (&d)[size]) {
    for (int i = 0; i < size; i++) {
        const float s = sigmoid<T>(g[i]), silu = g[i] * s, du = d[i] * u[i];
        u[i] = silu * u[i];
        d[i] = d[i] * g[i] * s;
        g[i] = du * s * (1.0f + g[i] * (1.0f - s));
    }
}

}  // namespace llamac
