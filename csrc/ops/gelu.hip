// GELU (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016) of a sum with a bias, which is optional. The sum v = x + bias is
// not rounded before.
//
//   out = v * P(v)
//   dx  = dout * (P(v) + v * P'(v));   the gradient of the bias is bias_backward of dx (bias.hip)
//
//   erf:   P(v) = (1 + erf(v / sqrt(2))) / 2,   P'(v) = e^(-v^2 / 2) / sqrt(2 pi)
//   tanh:  P(v) = (1 + tanh(u / 2)) / 2 = s(u) = 1 / (1 + e^-u),   u = 2 sqrt(2 / pi) (v + 0.044715 v^3)
//          P'(v) = s(u) s(-u) du/dv
//
// In the backward, dx and out may be x's or dout's memory: an element is read before its results are written. out is optional: it
// recomputes the forward output, the same bits.
//
// reference:  plain loops.
// cpu:        rows over threads, vector lanes over columns, fast_erf, fast_exp.
// naive:      one thread per element.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/device.h"
#include "core/operation.h"
#include "core/simd.h"

namespace llamac {
namespace {

constexpr double root_half = 0.70710678118654752440;     // 1 / sqrt(2)
constexpr double density_at_0 = 0.39894228040143267794;  // 1 / sqrt(2 pi)
constexpr double tanh_scale = 1.59576912160573071176;    // 2 sqrt(2 / pi)
constexpr double tanh_cube = 0.044715;
// Beyond it s(u) is 0 or 1 in all types, and the cube of v, which may be infinite, would be multiplied by 0.
constexpr float tanh_limit = 32;

// P(v) and v P'(v).
template <class A>
struct Share {
    A value, slope;
};
template <class A>
Share<A> share_reference(A v, bool tanh) {
    if (tanh) {
        const A w = std::clamp(v, -A(tanh_limit), A(tanh_limit));
        const A u = A(tanh_scale) * (w + A(tanh_cube) * w * w * w);
        const A s = 1 / (1 + std::exp(-u)), other = 1 / (1 + std::exp(u));
        return {s, v * s * other * A(tanh_scale) * (1 + 3 * A(tanh_cube) * w * w)};
    }
    return {std::erfc(-v * A(root_half)) / 2, v * A(density_at_0) * std::exp(-v * v / 2)};
}

template <class T>
void gelu_forward_reference(View<T, 2> out, View<const T, 2> x, View<const T, 1> bias, bool tanh) {
    using A = arithmetic<T>;
    for (int64_t n = 0; n < x.shape[0]; n++)
        for (int64_t f = 0; f < x.shape[1]; f++) {
            const A v = A(x(n, f)) + (bias ? A(bias(f)) : A(0));
            out(n, f) = T(v * share_reference(v, tanh).value);
        }
}

template <class T>
void gelu_backward_reference(View<T, 2> dx, View<T, 2> out, View<const T, 2> dout, View<const T, 2> x,
                             View<const T, 1> bias, bool tanh) {
    using A = arithmetic<T>;
    for (int64_t n = 0; n < x.shape[0]; n++)
        for (int64_t f = 0; f < x.shape[1]; f++) {
            const A v = A(x(n, f)) + (bias ? A(bias(f)) : A(0)), d = A(dout(n, f));
            const Share<A> p = share_reference(v, tanh);
            dx(n, f) = T(d * (p.value + p.slope));
            if (out) out(n, f) = T(v * p.value);
        }
}

// ---- cpu

// e^-|u| never overflows.
template <bool tanh>
inline Share<float> share_cpu(float v) {
    if (tanh) {
        const float w = std::min(std::max(v, -tanh_limit), tanh_limit);
        const float u = float(tanh_scale) * w * (1.0f + float(tanh_cube) * w * w);
        const float e = fast_exp(-std::fabs(u)), s = 1.0f / (1.0f + e);
        return {u < 0 ? e * s : s,
                v * e * s * s * (float(tanh_scale) * (1.0f + float(3 * tanh_cube) * w * w))};
    }
    return {0.5f + 0.5f * fast_erf(v * float(root_half)), v * float(density_at_0) * fast_exp(-0.5f * v * v)};
}

// Not inlined, so that the forward and the backward compute the same bits. bias may be null.
template <class T, bool tanh>
[[gnu::noinline]] void gelu_row(T* out, const T* x, const T* bias, int64_t F) {
#pragma omp simd
    for (int64_t f = 0; f < F; f++) {
        const float v = float(x[f]) + (bias ? float(bias[f]) : 0.0f);
        store(out + f, v * share_cpu<tanh>(v).value);
    }
}
template <class T, bool tanh>
void gelu_backward_row(T* dx, const T* dout, const T* x, const T* bias, int64_t F) {
#pragma omp simd
    for (int64_t f = 0; f < F; f++) {
        const float v = float(x[f]) + (bias ? float(bias[f]) : 0.0f);
        const Share<float> p = share_cpu<tanh>(v);
        store(dx + f, float(dout[f]) * (p.value + p.slope));
    }
}

template <class T>
void gelu_forward_cpu(View<T, 2> out, View<const T, 2> x, View<const T, 1> bias, bool tanh) {
    const int64_t N = x.shape[0], F = x.shape[1];
    const auto row = tanh ? gelu_row<T, true> : gelu_row<T, false>;
#pragma omp parallel for if (N > 1)
    for (int64_t n = 0; n < N; n++) row(&out(n, 0), &x(n, 0), bias.data, F);
}

template <class T>
void gelu_backward_cpu(View<T, 2> dx, View<T, 2> out, View<const T, 2> dout, View<const T, 2> x,
                       View<const T, 1> bias, bool tanh) {
    const int64_t N = x.shape[0], F = x.shape[1];
    const auto row = tanh ? gelu_row<T, true> : gelu_row<T, false>;
    const auto backward_row = tanh ? gelu_backward_row<T, true> : gelu_backward_row<T, false>;
#pragma omp parallel
    {
        std::vector<T> again(out ? static_cast<size_t>(F)
                                 : 0);  // until x and dout, where out may lie, were read
#pragma omp for
        for (int64_t n = 0; n < N; n++) {
            if (out) row(again.data(), &x(n, 0), bias.data, F);
            backward_row(&dx(n, 0), &dout(n, 0), &x(n, 0), bias.data, F);
            if (out) std::copy(again.begin(), again.end(), &out(n, 0));
        }
    }
}

// ---- naive

__device__ inline Share<float> share_naive(float v, bool tanh) {
    if (tanh) {
        const float w = fminf(fmaxf(v, -tanh_limit), tanh_limit);
        const float u = float(tanh_scale) * (w + float(tanh_cube) * w * w * w), s = 1.0f / (1.0f + expf(-u));
        const float other = 1.0f / (1.0f + expf(u));
        return {s, v * s * other * float(tanh_scale) * (1.0f + float(3 * tanh_cube) * w * w)};
    }
    return {0.5f + 0.5f * erff(v * float(root_half)), v * float(density_at_0) * expf(-0.5f * v * v)};
}

template <class T>
__global__ void gelu_forward_naive_kernel(T* out, const T* x, const T* bias, int64_t N, int64_t F,
                                          bool tanh) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= N * F) return;
    const float v = float(x[i]) + (bias ? float(bias[i % F]) : 0.0f);
    out[i] = T(v * share_naive(v, tanh).value);
}

template <class T>
void gelu_forward_naive(View<T, 2> out, View<const T, 2> x, View<const T, 1> bias, bool tanh,
                        LaunchContext context) {
    const int64_t N = x.shape[0], F = x.shape[1];
    launch(context.grid(N * F), gelu_forward_naive_kernel<T>, out.data, x.data, bias.data, N, F, tanh);
}

template <class T>
__global__ void gelu_backward_naive_kernel(T* dx, T* out, const T* dout, const T* x, const T* bias, int64_t N,
                                           int64_t F, bool tanh) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= N * F) return;
    const float v = float(x[i]) + (bias ? float(bias[i % F]) : 0.0f);
    const Share<float> p = share_naive(v, tanh);
    dx[i] = T(float(dout[i]) * (p.value + p.slope));
    if (out) out[i] = T(v * p.value);
}

template <class T>
void gelu_backward_naive(View<T, 2> dx, View<T, 2> out, View<const T, 2> dout, View<const T, 2> x,
                         View<const T, 1> bias, bool tanh, LaunchContext context) {
    const int64_t N = x.shape[0], F = x.shape[1];
    launch(context.grid(N * F), gelu_backward_naive_kernel<T>, dx.data, out.data, dout.data, x.data,
           bias.data, N, F, tanh);
}

Operation gelu_forward(
    "gelu_forward<T: f32 bf16 f64>(out: T[N,F]; x: T[N,F], bias?: T[F]; tanh: bool) rows(N) empty(N)"
    " derivative gelu_backward(dx: grad x; dout: grad out, x, bias; tanh)"
    " derivative bias_backward(dbias: grad bias; dout: grad x)",
    "out = gelu(x + bias)",
    {{"cpu", "rows over threads, vector lanes over columns",
      instantiations<LLAMAC_FLOATS(gelu_forward_cpu)>()},
     {"naive", "one thread per element", instantiations<LLAMAC_FLOATS(gelu_forward_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(gelu_forward_reference), gelu_forward_reference<double>>()}},
    [](const Call& c) { return 8.0 * c["N"] * c["F"]; });

Operation gelu_backward(
    "gelu_backward<T: f32 bf16 f64>"
    "(dx: T[N,F] may_share(x, dout), out?: T[N,F] may_share(x, dout);"
    " dout: T[N,F], x: T[N,F], bias?: T[F]; tanh: bool) rows(N) empty(N)",
    "gradient of gelu_forward, and its result again",
    {{"cpu", "rows over threads, vector lanes over columns",
      instantiations<LLAMAC_FLOATS(gelu_backward_cpu)>()},
     {"naive", "one thread per element", instantiations<LLAMAC_FLOATS(gelu_backward_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(gelu_backward_reference), gelu_backward_reference<double>>()}},
    [](const Call& c) { return 16.0 * c["N"] * c["F"]; });

}  // namespace
}  // namespace llamac
