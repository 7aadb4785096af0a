// SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020). A row of gate_up is [gate | up], F columns
// each, as one matmul writes it.
//
//   out = silu(gate) * up,   silu(g) = g * s,   s = 1 / (1 + e^-g)
//   dgate = dout * up * s * (1 + g (1 - s)),   dup = dout * silu(gate)
//
// dgate_up may be gate_up's memory: an element's gate and up are read before its gradients are written.
//
// reference: plain loops.
// cpu:       rows over threads, vector lanes over columns, fast_exp.
#include <cmath>

#include "core/registry.h"
#include "core/simd.h"

namespace llamac {
namespace {

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
void swiglu_backward_reference(View<T, 2> dgate_up, View<const T, 2> dout, View<const T, 2> gate_up) {
    using A = arithmetic<T>;
    const int64_t N = dout.shape[0], F = dout.shape[1];
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            const A g = A(gate_up(n, f)), up = A(gate_up(n, F + f)), d = A(dout(n, f));
            const A s = 1 / (1 + std::exp(-g));
            dgate_up(n, f) = T(d * up * s * (1 + g * (1 - s)));
            dgate_up(n, F + f) = T(d * g * s);
        }
}

template <class T>
void swiglu_forward_cpu(View<T, 2> out, View<const T, 2> gate_up) {
    const int64_t N = out.shape[0], F = out.shape[1];
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        const T *gate = &gate_up(n, 0), *up = gate + F;
        T* o = &out(n, 0);
#pragma omp simd
        for (int64_t f = 0; f < F; f++) {
            const float g = float(gate[f]);
            store(o + f, g / (1.0f + fast_exp(-g)) * float(up[f]));
        }
    }
}

template <class T>
void swiglu_backward_cpu(View<T, 2> dgate_up, View<const T, 2> dout, View<const T, 2> gate_up) {
    const int64_t N = dout.shape[0], F = dout.shape[1];
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        const T *gate = &gate_up(n, 0), *up = gate + F, *d = &dout(n, 0);
        T *dgate = &dgate_up(n, 0), *dup = dgate + F;
#pragma omp simd
        for (int64_t f = 0; f < F; f++) {
            const float g = float(gate[f]), u = float(up[f]), df = float(d[f]);
            const float s = 1.0f / (1.0f + fast_exp(-g));
            store(dgate + f, df * u * s * (1.0f + g * (1.0f - s)));
            store(dup + f, df * g * s);
        }
    }
}

Operation swiglu_forward("swiglu_forward(out: T[N,F]; gate_up: T[N,2F])", "out = silu(gate) * up",
                         {{"cpu", "rows over threads, vector lanes over columns", Where::host,
                           entries<swiglu_forward_cpu<float>, swiglu_forward_cpu<bf16>>()},
                          {"reference", "plain loops", Where::host,
                           entries<swiglu_forward_reference<float>, swiglu_forward_reference<bf16>,
                                   swiglu_forward_reference<double>>()}},
                         [](const Call& c) { return 5.0 * c["N"] * c["F"]; });

Operation swiglu_backward("swiglu_backward(dgate_up: T[N,2F]; dout: T[N,F], gate_up: T[N,2F])",
                          "gradients of swiglu_forward",
                          {{"cpu", "rows over threads, vector lanes over columns", Where::host,
                            entries<swiglu_backward_cpu<float>, swiglu_backward_cpu<bf16>>()},
                           {"reference", "plain loops", Where::host,
                            entries<swiglu_backward_reference<float>, swiglu_backward_reference<bf16>,
                                    swiglu_backward_reference<double>>()}},
                          [](const Call& c) { return 12.0 * c["N"] * c["F"]; });

}  // namespace
}  // namespace llamac
