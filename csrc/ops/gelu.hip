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
// vectorized: 128-bit accesses: a thread has one vector of columns in a few rows, with all loads in flight before the first is used,
//             and the bias once for them. Without overflow or cancellation by e^-|u|; narrow types take P from Abramowitz and
//             Stegun, "Handbook of Mathematical Functions", 26.2.17 (error 7.5e-8), which has the density that P' needs.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/operation.h"
#include "core/simd.h"
#include "ops/row_tiles.h"

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

// ---- vectorized: 128-bit accesses

constexpr int block_threads = 512;  // at most; two such blocks per multiprocessor, as in swiglu.hip
// One where accesses are narrow: those of more would be more than registers.
template <bool whole>
constexpr int forward_rows = whole ? 4 : 1;
template <bool whole>
constexpr int backward_rows = whole ? 2 : 1;

// fmaf: one rounding order for all compilers, so that the forward and the backward compute the same bits.
template <class T, bool tanh>
__device__ Share<float> share(float v) {
    const auto power = [](float y) { return narrow<T> ? __expf(y) : expf(y); };
    const auto reciprocal = [](float y) { return narrow<T> ? fast_reciprocal(y) : 1.0f / y; };
    if constexpr (tanh) {
        const float w = fminf(fmaxf(v, -tanh_limit), tanh_limit), square = w * w;
        const float u = w * fmaf(float(tanh_scale * tanh_cube), square, float(tanh_scale));
        const float e = power(-fabsf(u)), s = reciprocal(1.0f + e), other = e * s;
        const float du = fmaf(float(3 * tanh_scale * tanh_cube), square, float(tanh_scale));
        return {u < 0 ? other : s, v * other * s * du};
    } else {
        const float density = float(density_at_0) * power(-0.5f * v * v);
        if constexpr (!narrow<T>) return {fmaf(0.5f, erff(v * float(root_half)), 0.5f), v * density};
        const float t = reciprocal(fmaf(0.2316419f, fabsf(v), 1.0f)), scale = density * t;
        float tail = 1.330274429f;
        tail = fmaf(tail, t, -1.821255978f);
        tail = fmaf(tail, t, 1.781477937f);
        tail = fmaf(tail, t, -0.356563782f);
        tail = fmaf(tail, t, 0.31938153f);
        return {v < 0 ? scale * tail : fmaf(-scale, tail, 1.0f), v * density};
    }
}

// v = x + bias of one vector.
template <class T, int size>
__device__ void unpack_sum(uint4 x, const float (&bias)[size], float (&v)[size]) {
    unpack<T>(x, v);
    for (int i = 0; i < size; i++) v[i] += bias[i];
}

template <class T, bool whole, bool tanh>
__global__ void __launch_bounds__(block_threads, 2)
    gelu_forward_vectorized_kernel(Dependent<T*> out_, Dependent<const T*> x_, Dependent<const T*> bias_,
                                   int64_t N, int64_t F, unsigned across) {
    const auto [out, x, bias] = start_next_and_wait(out_, x_, bias_);
    constexpr int size = vector_size<T>, rows = forward_rows<whole>;
    const int64_t f = (int64_t{blockIdx.x % across} * blockDim.x + threadIdx.x) * size;
    const int64_t first = int64_t{blockIdx.x / across} * (rows * blockDim.y) + threadIdx.y;
    if (f >= F) return;
    uint4 own[rows];
#pragma unroll
    for (int r = 0; r < rows; r++) {
        const int64_t n = first + r * blockDim.y;
        own[r] = load_part<whole>(x + n * F, f, n < N ? F : 0);
    }
    float b[size] = {};
    if (bias) unpack<T>(load_part<whole>(bias, f, F), b);
#pragma unroll
    for (int r = 0; r < rows; r++) {
        const int64_t n = first + r * blockDim.y;
        float v[size];
        unpack_sum<T>(own[r], b, v);
        for (int i = 0; i < size; i++) v[i] *= share<T, tanh>(v[i]).value;
        store_part<whole>(out + n * F, f, n < N ? F : 0, pack<T>(v));
    }
}

template <class T, bool whole, bool tanh>
__global__ void __launch_bounds__(block_threads, 2)
    gelu_backward_vectorized_kernel(Dependent<T*> dx_, Dependent<T*> out_, Dependent<const T*> dout_,
                                    Dependent<const T*> x_, Dependent<const T*> bias_, int64_t N, int64_t F,
                                    unsigned across) {
    const auto [dx, out, dout, x, bias] = start_next_and_wait(dx_, out_, dout_, x_, bias_);
    constexpr int size = vector_size<T>, rows = backward_rows<whole>;
    const int64_t f = (int64_t{blockIdx.x % across} * blockDim.x + threadIdx.x) * size;
    const int64_t first = int64_t{blockIdx.x / across} * (rows * blockDim.y) + threadIdx.y;
    if (f >= F) return;
    uint4 own[rows], douts[rows];
#pragma unroll
    for (int r = 0; r < rows; r++) {
        const int64_t n = first + r * blockDim.y, end = n < N ? F : 0;
        own[r] = load_part<whole>(x + n * F, f, end);
        douts[r] = load_part<whole>(dout + n * F, f, end);
    }
    float b[size] = {};
    if (bias) unpack<T>(load_part<whole>(bias, f, F), b);
#pragma unroll
    for (int r = 0; r < rows; r++) {
        const int64_t n = first + r * blockDim.y, end = n < N ? F : 0;
        float v[size], d[size];
        unpack_sum<T>(own[r], b, v);
        unpack<T>(douts[r], d);
        for (int i = 0; i < size; i++) {
            const Share<float> p = share<T, tanh>(v[i]);
            d[i] *= p.value + p.slope;
            v[i] *= p.value;
        }
        store_part<whole>(dx + n * F, f, end, pack<T>(d));
        if (out) store_part<whole>(out + n * F, f, end, pack<T>(v));
    }
}

template <class T>
void gelu_forward_vectorized(View<T, 2> out, View<const T, 2> x, View<const T, 1> bias, bool tanh,
                             LaunchContext context) {
    const int64_t N = x.shape[0], F = x.shape[1];
    const bool whole = is_whole({out.data, x.data, bias.data}, F, vector_size<T>);
    const int rows = whole ? forward_rows<true> : forward_rows<false>;
    const RowTiles t = row_tiles(N, F, vector_size<T>, rows, context.threads);
    using Kernel =
        void (*)(Dependent<T*>, Dependent<const T*>, Dependent<const T*>, int64_t, int64_t, unsigned);
    static constexpr Kernel kernels[2][2] = {
        {gelu_forward_vectorized_kernel<T, false, false>, gelu_forward_vectorized_kernel<T, false, true>},
        {gelu_forward_vectorized_kernel<T, true, false>, gelu_forward_vectorized_kernel<T, true, true>}};
    launch(Grid(t.blocks, t.threads, context.stream), kernels[whole][tanh], out.data, x.data, bias.data, N, F,
           t.across);
}

template <class T>
void gelu_backward_vectorized(View<T, 2> dx, View<T, 2> out, View<const T, 2> dout, View<const T, 2> x,
                              View<const T, 1> bias, bool tanh, LaunchContext context) {
    const int64_t N = x.shape[0], F = x.shape[1];
    const bool whole = is_whole({dx.data, out.data, dout.data, x.data, bias.data}, F, vector_size<T>);
    const int rows = whole ? backward_rows<true> : backward_rows<false>;
    const RowTiles t = row_tiles(N, F, vector_size<T>, rows, context.threads);
    using Kernel = void (*)(Dependent<T*>, Dependent<T*>, Dependent<const T*>, Dependent<const T*>,
                            Dependent<const T*>, int64_t, int64_t, unsigned);
    static constexpr Kernel kernels[2][2] = {
        {gelu_backward_vectorized_kernel<T, false, false>, gelu_backward_vectorized_kernel<T, false, true>},
        {gelu_backward_vectorized_kernel<T, true, false>, gelu_backward_vectorized_kernel<T, true, true>}};
    launch(Grid(t.blocks, t.threads, context.stream), kernels[whole][tanh], dx.data, out.data, dout.data,
           x.data, bias.data, N, F, t.across);
}

Operation gelu_forward(
    "gelu_forward<T: f32 bf16 fp16 f64>(out: T[N,F]; x: T[N,F], bias?: T[F]; tanh: bool) rows(N) empty(N)"
    " derivative gelu_backward(dx: grad x; dout: grad out, x, bias; tanh)"
    " derivative bias_backward(dbias: grad bias; dout: grad x)",
    "out = gelu(x + bias)",
    {{"cpu", "rows over threads, vector lanes over columns",
      instantiations<LLAMAC_FLOATS(gelu_forward_cpu)>()},
     {"vectorized", "the loads of four rows per thread in flight, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(gelu_forward_vectorized)>(), nullptr, blocks_of(128, 256, block_threads)},
     {"naive", "one thread per element", instantiations<LLAMAC_KERNELS(gelu_forward_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(gelu_forward_reference), gelu_forward_reference<double>>()}},
    [](const Call& c) { return 8.0 * c["N"] * c["F"]; });

Operation gelu_backward(
    "gelu_backward<T: f32 bf16 fp16 f64>"
    "(dx: T[N,F] may_share(x, dout), out?: T[N,F] may_share(x, dout);"
    " dout: T[N,F], x: T[N,F], bias?: T[F]; tanh: bool) rows(N) empty(N)",
    "gradient of gelu_forward, and its result again",
    {{"cpu", "rows over threads, vector lanes over columns",
      instantiations<LLAMAC_FLOATS(gelu_backward_cpu)>()},
     {"vectorized", "the loads of two rows per thread in flight, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(gelu_backward_vectorized)>(), nullptr,
      blocks_of(128, 256, block_threads)},
     {"naive", "one thread per element", instantiations<LLAMAC_KERNELS(gelu_backward_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(gelu_backward_reference), gelu_backward_reference<double>>()}},
    [](const Call& c) { return 16.0 * c["N"] * c["F"]; });

}  // namespace
}  // namespace llamac
