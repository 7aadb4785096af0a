// LayerNorm (Ba, Kiros and Hinton, "Layer Normalization", 2016), alone and of a sum of two tensors: every row is moved to mean 0 and
// variance 1, then scaled and moved by a weight and a bias per column.
//
//   mean[n]   = mean_c x[n,c]
//   rstd[n]   = 1 / sqrt(mean_c (x[n,c] - mean[n])^2 + eps)
//   out[n,c]  = xhat[n,c] * weight[c] + bias[c],   xhat = (x - mean) * rstd
//   residual_layernorm_forward: the same of sum = x + residual, which is rounded to storage before; sum may be x's or residual's
//   memory
//
//   with g[n,c] = dout[n,c] * weight[c]:
//   dx[n,c]    = rstd[n] * (g[n,c] - mean_c(g) - xhat[n,c] * mean_c(g * xhat)) (+ dresidual[n,c], the gradient past the norm)
//   dweight[c] = sum_n dout[n,c] * xhat[n,c]
//   dbias[c]   = sum_n dout[n,c]
//   out        = optional: recomputes the forward output, the same bits, with this bias; null counts as zeros
//
// The variance is summed in a second pass: E[x^2] - E[x]^2 loses all digits where the mean is large. dx may be dresidual's or dout's
// memory.
//
// reference:  plain loops. Sums over a row or a column are double, as in rmsnorm.hip; fma, so that compilers round as one.
// cpu:        rows over threads, a row stays in the first cache between its passes. dweight and dbias are summed over blocks of
//             rows that N alone determines, then over the blocks.
// naive:      one thread per row, one thread per column for dweight and dbias.
// vectorized: a row stays in registers from the mean to the result, in as few warps as hold it: rows of GPT-2 have one or two, and
//             a block of one such row would wait most of its time. Backward as in rmsnorm.hip: a block takes every k-th row and
//             leaves one partial row of dweight and one of dbias, which a second kernel adds in their order. A thread keeps 16
//             elements of a row on NVIDIA and 8 on AMD, the sums of their columns in registers too.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/scratch.h"
#include "ops/column_sums.h"
#include "ops/rmsnorm.h"
#include "ops/unaligned.h"

namespace llamac {
namespace {

template <class T>
void layernorm_forward_reference(View<T, 2> out, View<arithmetic<T>, 1> mean, View<arithmetic<T>, 1> rstd,
                                 View<const T, 2> x, View<const T, 1> weight, View<const T, 1> bias,
                                 double eps) {
    using A = arithmetic<T>;
    const int64_t N = x.shape[0], C = x.shape[1];
    for (int64_t n = 0; n < N; n++) {
        double sum = 0, squares = 0;
        for (int64_t c = 0; c < C; c++) sum += double(x(n, c));
        const double m = sum / double(C);
        for (int64_t c = 0; c < C; c++) squares += (double(x(n, c)) - m) * (double(x(n, c)) - m);
        mean(n) = A(m);
        rstd(n) = A(1 / std::sqrt(squares / double(C) + eps));
        for (int64_t c = 0; c < C; c++)
            out(n, c) = T(std::fma((A(x(n, c)) - mean(n)) * rstd(n), A(weight(c)), A(bias(c))));
    }
}

template <class T>
void residual_layernorm_forward_reference(View<T, 2> sum, View<T, 2> out, View<arithmetic<T>, 1> mean,
                                          View<arithmetic<T>, 1> rstd, View<const T, 2> x,
                                          View<const T, 2> residual, View<const T, 1> weight,
                                          View<const T, 1> bias, double eps) {
    using A = arithmetic<T>;
    const int64_t N = x.shape[0], C = x.shape[1];
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) sum(n, c) = T(A(x(n, c)) + A(residual(n, c)));
    const View<const T, 2> rows{sum.data, {N, C}, {sum.stride[0], sum.stride[1]}};
    layernorm_forward_reference<T>(out, mean, rstd, rows, weight, bias, eps);
}

template <class T, class G>
void layernorm_backward_reference(View<T, 2> dx, View<G, 1> dweight, View<G, 1> dbias, View<T, 2> out,
                                  View<const T, 2> dout, View<const T, 2> x, View<const T, 1> weight,
                                  View<const T, 1> bias, View<const arithmetic<T>, 1> mean,
                                  View<const arithmetic<T>, 1> rstd, View<const T, 2> dresidual,
                                  bool accumulate) {
    using A = arithmetic<T>;
    const int64_t N = x.shape[0], C = x.shape[1];
    std::vector<double> dw(C, 0), db(C, 0);
    for (int64_t n = 0; n < N; n++) {
        const auto xhat = [&](int64_t c) { return (A(x(n, c)) - mean(n)) * rstd(n); };
        double sum = 0, dot = 0;
        for (int64_t c = 0; c < C; c++) {
            const double g = double(A(dout(n, c)) * A(weight(c)));
            sum += g;
            dot += g * double(xhat(c));
            dw[c] += double(dout(n, c)) * double(xhat(c));
            db[c] += double(dout(n, c));
        }
        const A mean_g = A(sum / double(C)), mean_gx = A(dot / double(C));
        for (int64_t c = 0; c < C; c++) {
            const A g = A(dout(n, c)) * A(weight(c)), past = dresidual ? A(dresidual(n, c)) : A(0);
            dx(n, c) = T(rstd(n) * (g - mean_g - xhat(c) * mean_gx) + past);
            if (out) out(n, c) = T(std::fma(xhat(c), A(weight(c)), bias ? A(bias(c)) : A(0)));
        }
    }
    for (int64_t c = 0; c < C; c++) {
        dweight(c) = G(A((accumulate ? double(dweight(c)) : 0.0) + dw[c]));
        dbias(c) = G(A((accumulate ? double(dbias(c)) : 0.0) + db[c]));
    }
}

// ---- cpu

// Not inlined, so that the forward and the backward compute the same bits. bias may be null.
template <class T>
[[gnu::noinline]] void scale_row(T* out, const T* x, const T* weight, const T* bias, float mean, float rstd,
                                 int64_t C) {
#pragma omp simd
    for (int64_t c = 0; c < C; c++)
        store(out + c, (float(x[c]) - mean) * rstd * float(weight[c]) + (bias ? float(bias[c]) : 0.0f));
}

template <class T>
void move_and_normalize_row(T* out, float& mean, float& rstd, const T* x, const T* weight, const T* bias,
                            int64_t C, double eps) {
    const double size = static_cast<double>(C);
    const float m = static_cast<float>(block_sum(C, [x](int64_t c) { return float(x[c]); }) / size);
    const double squares = block_sum(C, [x, m](int64_t c) { return (float(x[c]) - m) * (float(x[c]) - m); });
    mean = m;
    rstd = static_cast<float>(1 / std::sqrt(squares / size + eps));
    scale_row(out, x, weight, bias, mean, rstd, C);
}

template <class T>
void layernorm_forward_cpu(View<T, 2> out, View<float, 1> mean, View<float, 1> rstd, View<const T, 2> x,
                           View<const T, 1> weight, View<const T, 1> bias, double eps) {
    const int64_t N = x.shape[0], C = x.shape[1];
#pragma omp parallel for if (N > 1)
    for (int64_t n = 0; n < N; n++)
        move_and_normalize_row(&out(n, 0), mean(n), rstd(n), &x(n, 0), weight.data, bias.data, C, eps);
}

template <class T>
void residual_layernorm_forward_cpu(View<T, 2> sum, View<T, 2> out, View<float, 1> mean, View<float, 1> rstd,
                                    View<const T, 2> x, View<const T, 2> residual, View<const T, 1> weight,
                                    View<const T, 1> bias, double eps) {
    const int64_t N = x.shape[0], C = x.shape[1];
#pragma omp parallel for if (N > 1)
    for (int64_t n = 0; n < N; n++) {
        const T *a = &x(n, 0), *b = &residual(n, 0);
        T* s = &sum(n, 0);
#pragma omp simd
        for (int64_t c = 0; c < C; c++) store(s + c, float(a[c]) + float(b[c]));
        move_and_normalize_row<T>(&out(n, 0), mean(n), rstd(n), s, weight.data, bias.data, C, eps);
    }
}

// One row of the backward pass; dw[C] and db[C] gather its shares of dweight and dbias. past, dresidual's row, may be null. g[C]
// is scratch, where dout * weight is rounded: with few columns g - mean_g cancels, and FMA would leave the product's error.
template <class T>
void layernorm_backward_row(T* dx, float* dw, float* db, float* g, const T* dout, const T* x, const T* weight,
                            float mean, float rstd, const T* past, int64_t C) {
    const auto xhat = [=](int64_t c) { return (float(x[c]) - mean) * rstd; };
#pragma omp simd
    for (int64_t c = 0; c < C; c++) g[c] = float(dout[c]) * float(weight[c]);
    const double size = static_cast<double>(C), sum = block_sum(C, [g](int64_t c) { return g[c]; });
    const double dot = block_sum(C, [=](int64_t c) { return g[c] * xhat(c); });
    const float mean_g = static_cast<float>(sum / size), mean_gx = static_cast<float>(dot / size);
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
        const float d = float(dout[c]);
        dw[c] += d * xhat(c);
        db[c] += d;
        store(dx + c, rstd * (g[c] - mean_g - xhat(c) * mean_gx) + (past ? float(past[c]) : 0.0f));
    }
}

template <class T, class G>
void layernorm_backward_cpu(View<T, 2> dx, View<G, 1> dweight, View<G, 1> dbias, View<T, 2> out,
                            View<const T, 2> dout, View<const T, 2> x, View<const T, 1> weight,
                            View<const T, 1> bias, View<const float, 1> mean, View<const float, 1> rstd,
                            View<const T, 2> dresidual, bool accumulate) {
    const int64_t N = x.shape[0], C = x.shape[1];
    // A row of sums has dweight's, then dbias's.
    const std::vector<float> all = column_sums(N, 2 * C, [&](int64_t first, int64_t last, float* sums) {
        static thread_local Scratch own;
        float* const g = own.reserve<float>(C);
        for (int64_t n = first; n < last; n++) {
            layernorm_backward_row(&dx(n, 0), sums, sums + C, g, &dout(n, 0), &x(n, 0), weight.data, mean(n),
                                   rstd(n), dresidual ? &dresidual(n, 0) : nullptr, C);
            if (out) scale_row(&out(n, 0), &x(n, 0), weight.data, bias.data, mean(n), rstd(n), C);
        }
    });
    for (int64_t c = 0; c < C; c++) {
        dweight(c) = G((accumulate ? float(dweight(c)) : 0.0f) + all[c]);
        dbias(c) = G((accumulate ? float(dbias(c)) : 0.0f) + all[C + c]);
    }
}

// ---- kernels

// One rounding order for all compilers: the forward and the backward compute the same bits.
__device__ inline float scaled(float xhat, float weight, float bias) {
    return fmaf(xhat, weight, bias);
}
// dout * weight, rounded before it is used, as in layernorm_backward_row: an FMA is not merged with a subtraction.
__device__ inline float product(float dout, float weight) {
    return fmaf(dout, weight, 0.0f);
}

// ---- naive

template <class T>
__device__ void move_and_normalize_row_naive(T* out, float* mean, float* rstd, const T* x, const T* weight,
                                             const T* bias, int64_t C, float eps) {
    double sum = 0, squares = 0;
    for (int64_t c = 0; c < C; c++) sum += double(float(x[c]));
    const double m = sum / static_cast<double>(C);
    for (int64_t c = 0; c < C; c++) squares += (double(float(x[c])) - m) * (double(float(x[c])) - m);
    *mean = static_cast<float>(m);
    *rstd = static_cast<float>(1 / sqrt(squares / static_cast<double>(C) + double(eps)));
    for (int64_t c = 0; c < C; c++)
        out[c] = T(scaled((float(x[c]) - *mean) * *rstd, float(weight[c]), float(bias[c])));
}

template <class T>
__global__ void layernorm_forward_naive_kernel(T* out, float* mean, float* rstd, const T* x, const T* weight,
                                               const T* bias, int64_t N, int64_t C, float eps) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (n < N) move_and_normalize_row_naive(out + n * C, mean + n, rstd + n, x + n * C, weight, bias, C, eps);
}

template <class T>
void layernorm_forward_naive(View<T, 2> out, View<float, 1> mean, View<float, 1> rstd, View<const T, 2> x,
                             View<const T, 1> weight, View<const T, 1> bias, double eps,
                             LaunchContext context) {
    const int64_t N = x.shape[0], C = x.shape[1];
    launch(context.grid(N), layernorm_forward_naive_kernel<T>, out.data, mean.data, rstd.data, x.data,
           weight.data, bias.data, N, C, eps);
}

template <class T>
__global__ void residual_layernorm_forward_naive_kernel(T* sum, T* out, float* mean, float* rstd, const T* x,
                                                        const T* residual, const T* weight, const T* bias,
                                                        int64_t N, int64_t C, float eps) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (n >= N) return;
    for (int64_t c = n * C; c < (n + 1) * C; c++) sum[c] = T(float(x[c]) + float(residual[c]));
    const T* row = sum + n * C;
    move_and_normalize_row_naive(out + n * C, mean + n, rstd + n, row, weight, bias, C, eps);
}

template <class T>
void residual_layernorm_forward_naive(View<T, 2> sum, View<T, 2> out, View<float, 1> mean,
                                      View<float, 1> rstd, View<const T, 2> x, View<const T, 2> residual,
                                      View<const T, 1> weight, View<const T, 1> bias, double eps,
                                      LaunchContext context) {
    const int64_t N = x.shape[0], C = x.shape[1];
    launch(context.grid(N), residual_layernorm_forward_naive_kernel<T>, sum.data, out.data, mean.data,
           rstd.data, x.data, residual.data, weight.data, bias.data, N, C, eps);
}

template <class T>
__global__ void layernorm_backward_naive_kernel(T* dx, T* out, const T* dout, const T* x, const T* weight,
                                                const T* bias, const float* mean, const float* rstd,
                                                const T* dresidual, int64_t N, int64_t C) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const float m = mean[n], r = rstd[n];
    const T *x_row = x + n * C, *dout_row = dout + n * C;
    const auto xhat = [=](int64_t c) { return (float(x_row[c]) - m) * r; };
    const auto g = [=](int64_t c) { return product(float(dout_row[c]), float(weight[c])); };
    double sum = 0, dot = 0;
    for (int64_t c = 0; c < C; c++) {
        sum += double(g(c));
        dot += double(g(c)) * double(xhat(c));
    }
    const float mean_g = static_cast<float>(sum / static_cast<double>(C));
    const float mean_gx = static_cast<float>(dot / static_cast<double>(C));
    for (int64_t c = 0; c < C; c++) {
        const float past = dresidual ? float(dresidual[n * C + c]) : 0.0f;
        dx[n * C + c] = T(r * (g(c) - mean_g - xhat(c) * mean_gx) + past);
        if (out) out[n * C + c] = T(scaled(xhat(c), float(weight[c]), bias ? float(bias[c]) : 0.0f));
    }
}

template <class T, class G>
__global__ void layernorm_backward_naive_kernel_columns(G* dweight, G* dbias, const T* dout, const T* x,
                                                        const float* mean, const float* rstd, int64_t N,
                                                        int64_t C, bool accumulate) {
    const int64_t c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (c >= C) return;
    double dw = accumulate ? double(float(dweight[c])) : 0.0, db = accumulate ? double(float(dbias[c])) : 0.0;
    for (int64_t n = 0; n < N; n++) {
        const double d = double(float(dout[n * C + c]));
        dw += d * double((float(x[n * C + c]) - mean[n]) * rstd[n]);
        db += d;
    }
    dweight[c] = G(static_cast<float>(dw));
    dbias[c] = G(static_cast<float>(db));
}

template <class T, class G>
void layernorm_backward_naive(View<T, 2> dx, View<G, 1> dweight, View<G, 1> dbias, View<T, 2> out,
                              View<const T, 2> dout, View<const T, 2> x, View<const T, 1> weight,
                              View<const T, 1> bias, View<const float, 1> mean, View<const float, 1> rstd,
                              View<const T, 2> dresidual, bool accumulate, LaunchContext context) {
    const int64_t N = x.shape[0], C = x.shape[1];
    // The columns first: dx may take dout's place.
    launch(context.grid(C), layernorm_backward_naive_kernel_columns<T, G>, dweight.data, dbias.data,
           dout.data, x.data, mean.data, rstd.data, N, C, accumulate);
    launch(context.grid(N), layernorm_backward_naive_kernel<T>, dx.data, out.data, dout.data, x.data,
           weight.data, bias.data, mean.data, rstd.data, dresidual.data, N, C);
}

// ---- vectorized: the row in registers

// The sum over a row's threads (x), in each of them; warps: of the block, which all its threads call it with.
__device__ inline float row_sum(float value, float* warps) {
    value = warp_sum(value);
    const int row_warps = static_cast<int>(blockDim.x) / warp_size;
    if (row_warps == 1) return value;
    float* const own = warps + static_cast<int>(threadIdx.y) * row_warps;
    if (lane_index() == 0) own[warp_index()] = value;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < row_warps; i++) sum += own[i];
    return sum;
}

// Threads (x: a row's columns, y: rows).
template <class T, int elements, bool whole, bool residual_too>
__global__ void __launch_bounds__(forward_threads)
    layernorm_forward_vectorized_kernel(Dependent<T*> sum_, Dependent<T*> out_, Dependent<float*> mean_,
                                        Dependent<float*> rstd_, Dependent<const T*> x_,
                                        Dependent<const T*> residual_, Dependent<const T*> weight_,
                                        Dependent<const T*> bias_, int64_t N, int64_t C, float eps) {
    const auto [sum, out, mean, rstd, x, residual, weight, bias] =
        start_next_and_wait(sum_, out_, mean_, rstd_, x_, residual_, weight_, bias_);
    constexpr int size = vector_size<T>, vectors = elements / size;
    struct Shared {
        float warps[2][max_warps];
    };
    Shared& shared = shared_memory<Shared>();
    const int64_t n = int64_t{blockIdx.x} * blockDim.y + threadIdx.y, row = n * C;
    const int64_t width = n < N ? C : 0;
    uint4 kept[vectors];
    float total = 0;
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        const int64_t c = (int64_t{v} * blockDim.x + threadIdx.x) * size;
        kept[v] = load_part<whole>(x + row, c, width);
        if constexpr (residual_too) {
            float a[size], b[size];
            unpack<T>(kept[v], a);
            unpack<T>(load_part<whole>(residual + row, c, width), b);
            for (int i = 0; i < size; i++) a[i] += b[i];
            kept[v] = pack<T>(a);
        }
    }
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        float a[size];
        unpack<T>(kept[v], a);
        for (int i = 0; i < size; i++) total += a[i];
    }
    const float m = row_sum(total, shared.warps[0]) / static_cast<float>(C);
    float squares = 0;
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        const int64_t c = (int64_t{v} * blockDim.x + threadIdx.x) * size;
        float a[size];
        unpack<T>(kept[v], a);
        for (int i = 0; i < size; i++) {
            const float d = (whole ? c : c + i) < C ? a[i] - m : 0.0f;
            squares += d * d;
        }
    }
    const float variance = row_sum(squares, shared.warps[1]) / static_cast<float>(C);
    const float r = 1.0f / sqrtf(variance + eps);
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        const int64_t c = (int64_t{v} * blockDim.x + threadIdx.x) * size;
        if constexpr (residual_too) store_part<whole>(sum + row, c, width, kept[v]);
        float a[size], w[size], b[size];
        unpack<T>(kept[v], a);
        unpack<T>(load_part<whole>(weight, c, C), w);
        unpack<T>(load_part<whole>(bias, c, C), b);
        for (int i = 0; i < size; i++) a[i] = scaled((a[i] - m) * r, w[i], b[i]);
        store_part<whole>(out + row, c, width, pack<T>(a));
    }
    if (threadIdx.x == 0 && n < N) {
        mean[n] = m;
        rstd[n] = r;
    }
}

template <class T, bool residual_too>
void launch_layernorm(T* sum, T* out, float* mean, float* rstd, const T* x, const T* residual,
                      const T* weight, const T* bias, int64_t N, int64_t C, double eps,
                      const LaunchContext& context) {
    using Kernel =
        void (*)(Dependent<T*>, Dependent<T*>, Dependent<float*>, Dependent<float*>, Dependent<const T*>,
                 Dependent<const T*>, Dependent<const T*>, Dependent<const T*>, int64_t, int64_t, float);
    static constexpr Kernel kernels[2][3] = {
        {layernorm_forward_vectorized_kernel<T, 8, false, residual_too>,
         layernorm_forward_vectorized_kernel<T, 16, false, residual_too>},
        {layernorm_forward_vectorized_kernel<T, 8, true, residual_too>,
         layernorm_forward_vectorized_kernel<T, 16, true, residual_too>,
         layernorm_forward_vectorized_kernel<T, 32, true, residual_too>}};
    const bool whole = is_whole({sum, out, x, residual, weight, bias}, C, vector_size<T>);
    const int columns = row_threads(C, whole ? max_forward : max_forward / 2, 1),
              rows = std::max(1, context.threads / columns);
    const dim3 threads(static_cast<unsigned>(columns), static_cast<unsigned>(rows));
    launch(Grid(blocks_for(N, rows), threads, context.stream), kernels[whole][kernel_index(C, columns)], sum,
           out, mean, rstd, x, residual, weight, bias, N, C, static_cast<float>(eps));
}

template <class T>
void layernorm_forward_vectorized(View<T, 2> out, View<float, 1> mean, View<float, 1> rstd,
                                  View<const T, 2> x, View<const T, 1> weight, View<const T, 1> bias,
                                  double eps, LaunchContext context) {
    launch_layernorm<T, false>(nullptr, out.data, mean.data, rstd.data, x.data, nullptr, weight.data,
                               bias.data, x.shape[0], x.shape[1], eps, context);
}

template <class T>
void residual_layernorm_forward_vectorized(View<T, 2> sum, View<T, 2> out, View<float, 1> mean,
                                           View<float, 1> rstd, View<const T, 2> x, View<const T, 2> residual,
                                           View<const T, 1> weight, View<const T, 1> bias, double eps,
                                           LaunchContext context) {
    launch_layernorm<T, true>(sum.data, out.data, mean.data, rstd.data, x.data, residual.data, weight.data,
                              bias.data, x.shape[0], x.shape[1], eps, context);
}

// Backward: threads have 128 registers, and as many elements of a row as those hold. The more elements, the fewer instructions each:
// shuffles, the barrier and the reads of the warps' sums are per thread.
constexpr int layernorm_backward_threads = backward_threads * registers_in_full_block / 128,
              layernorm_backward_elements = max_backward * backward_threads / layernorm_backward_threads;
BackwardShape layernorm_backward_shape(int64_t N, int64_t C, int wanted) {
    return backward_shape(N, C, wanted, layernorm_backward_elements, layernorm_backward_threads);
}

// warp_sum() of two values with half as many shuffles, the same bits: the first's is in the lower half of the lanes, the second's in
// the upper half.
__device__ inline float warp_sums(float first, float second) {
    const bool upper = lane_index() >= warp_size / 2;
    float sum = (upper ? second : first) + __shfl_xor(upper ? first : second, warp_size / 2);
    for (int distance = warp_size / 4; distance > 0; distance /= 2) sum += __shfl_xor(sum, distance);
    return sum;
}

template <class T, bool whole>
using LayerNormRowsInLds = RowsInLds<rows_in_lds<T, whole>, layernorm_backward_elements / vector_size<T>>;

// Threads and rows as in rmsnorm_backward_vectorized_kernel. partial[2, gridDim.x, C] gets the block's sums of dweight, then of
// dbias. Dynamic LDS: that of LayerNormRowsInLds, and no less than C floats where blockDim.y > 1. Issued instructions limit the
// kernel as much as memory does. So a thread's vectors lie a warp's width apart and share an address, and where `ahead`, the
// next row is loaded into the same registers once this one is unpacked. The bias is read anew for each row.
template <class T, bool whole, bool has_out>
__global__ void __launch_bounds__(layernorm_backward_threads)
    layernorm_backward_vectorized_kernel(Dependent<T*> dx_, Dependent<float*> partial_, Dependent<T*> out_,
                                         Dependent<const T*> dout_, Dependent<const T*> x_,
                                         Dependent<const T*> weight_, Dependent<const T*> bias_,
                                         Dependent<const float*> mean_, Dependent<const float*> rstd_,
                                         Dependent<const T*> dresidual_, int64_t N, int C, float inverse_C) {
    const auto [dx, partial, out, dout, x, weight, bias, mean, rstd, dresidual] =
        start_next_and_wait(dx_, partial_, out_, dout_, x_, weight_, bias_, mean_, rstd_, dresidual_);
    constexpr int size = vector_size<T>, vectors = layernorm_backward_elements / size,
                  apart = warp_size * size;
    constexpr int slots = rows_in_lds<T, whole>;
    // Addresses of narrow loads take the registers of loads ahead; more vectors than two spill.
    constexpr bool ahead = slots == 0 && vectors <= 2 && (whole || (vectors_anywhere && narrow<T>));
    struct Shared {
        float warps[2][max_warps][2];  // two: a row's sums are read while the next one's are written
    };
    Shared& shared = shared_memory<Shared>();
    const int row_warps = static_cast<int>(blockDim.x) / warp_size;
    const int first_warp = static_cast<int>(threadIdx.y) * row_warps;
    const int64_t step = int64_t{gridDim.x} * blockDim.y;
    const int column = warp_index() * vectors * apart + lane_index() * size;
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    uint4 w[vectors], own_x[vectors], own_dout[vectors], past[vectors];
    float dweight[vectors][size] = {}, dbias[vectors][size] = {};
    // otherwise: where there is no such row or column.
    const auto load = [N, C, column](const T* rows, int64_t n, int v, uint4 otherwise) {
        const int c = column + v * apart;
        return n < N && c < C ? load_row_part<whole>(rows + n * C, c, C) : otherwise;
    };
    LayerNormRowsInLds<T, whole> in_lds(first_warp + warp_index(), static_cast<int>(blockDim.x * blockDim.y));
    const auto copy = [&, dout = dout, x = x](int ahead, int64_t n) {
        const int64_t from = n * C + column;
        in_lds.copy(ahead, x + from, dout + from, apart,
                    [&](int v) { return n < N && column + v * apart < C; });
    };
    int64_t n = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    for (int k = 0; k + 1 < slots; k++) copy(k, n + k * step);
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        w[v] = load_row_part<whole>(weight, column + v * apart, C);
        own_x[v] = ahead ? load(x, n, v, zeros) : zeros;
        own_dout[v] = ahead ? load(dout, n, v, zeros) : zeros;
        past[v] = zeros;
    }
    float m = n < N ? mean[n] : 0.0f, r = n < N ? rstd[n] : 0.0f;
    int buffer = 0;
    for (int64_t first = int64_t{blockIdx.x} * blockDim.y; first < N; first += step, n += step, buffer ^= 1) {
        float xhat[vectors][size], g[vectors][size], sum_g = 0, sum_gx = 0;
        if constexpr (slots > 0) {
            copy(slots - 1, n + (slots - 1) * step);
            in_lds.read(own_x, own_dout);
        }
        if (dresidual)
#pragma unroll
            for (int v = 0; v < vectors; v++) past[v] = load(dresidual, n, v, past[v]);
#pragma unroll
        for (int v = 0; v < vectors; v++) {
            if (!ahead && slots == 0) own_x[v] = load(x, n, v, own_x[v]);
            if (!ahead && slots == 0) own_dout[v] = load(dout, n, v, zeros);
            float d[size], b[size];
            unpack<T>(own_x[v], xhat[v]);
            unpack<T>(own_dout[v], d);
            unpack<T>(w[v], b);
            for (int i = 0; i < size; i++) {
                xhat[v][i] = (xhat[v][i] - m) * r;
                g[v][i] = product(d[i], b[i]);
                dweight[v][i] += d[i] * xhat[v][i];
                dbias[v][i] += d[i];
                sum_g += g[v][i];
                sum_gx += g[v][i] * xhat[v][i];
            }
            if (ahead) own_x[v] = load(x, n + step, v, own_x[v]);
            if (ahead) own_dout[v] = load(dout, n + step, v, zeros);
        }
        const float this_r = r;
        m = n + step < N ? mean[n + step] : 0.0f;
        r = n + step < N ? rstd[n + step] : 0.0f;
        const float sum = warp_sums(sum_g, sum_gx);
        if (lane_index() % (warp_size / 2) == 0)
            shared.warps[buffer][first_warp + warp_index()][lane_index() / (warp_size / 2)] = sum;
        sync_row();
        sum_g = sum_gx = 0;
#pragma unroll 4
        for (int i = 0; i < row_warps; i++) {
            sum_g += shared.warps[buffer][first_warp + i][0];
            sum_gx += shared.warps[buffer][first_warp + i][1];
        }
        const float mean_g = sum_g * inverse_C, mean_gx = sum_gx * inverse_C;
        if (n >= N) continue;
#pragma unroll
        for (int v = 0; v < vectors; v++) {
            float a[size], b[size];
            unpack<T>(past[v], a);
            for (int i = 0; i < size; i++) a[i] += this_r * (g[v][i] - mean_g - xhat[v][i] * mean_gx);
            store_part<whole>(dx + n * C, column + v * apart, C, pack<T>(a));
            if constexpr (!has_out) continue;
            unpack<T>(w[v], b);
            unpack<T>(bias ? load_row_part<whole>(bias, column + v * apart, C) : zeros, a);
            for (int i = 0; i < size; i++) a[i] = scaled(xhat[v][i], b[i], a[i]);
            store_part<whole>(out + n * C, column + v * apart, C, pack<T>(a));
        }
    }
    if constexpr (slots > 0) in_lds.finish();  // the sums take the rows' place
    // partial's row: the sums of the block's rows y, in their order.
    float* const of_rows = reinterpret_cast<float*>(dynamic_shared_memory());
    const auto write_partial = [&](float* to, const float (&own)[vectors][size]) {
        for (unsigned y = 0; y < blockDim.y; y++) {
#pragma unroll
            for (int v = 0; v < vectors; v++)
                for (int i = 0; i < size; i++) {
                    const int c = column + v * apart + i;
                    if (y != threadIdx.y || c >= C) continue;
                    const float sum = own[v][i] + (y > 0 ? of_rows[c] : 0.0f);
                    (y + 1 < blockDim.y ? of_rows[c] : to[int64_t{blockIdx.x} * C + c]) = sum;
                }
            __syncthreads();
        }
    };
    write_partial(partial, dweight);
    write_partial(partial + int64_t{gridDim.x} * C, dbias);
}

// blockIdx.y: dweight, dbias.
template <class G>
__global__ void layernorm_backward_vectorized_kernel_columns(Dependent<G*> dweight_, Dependent<G*> dbias_,
                                                             Dependent<const float*> partial_, int rows,
                                                             int64_t C, bool accumulate) {
    const auto [dweight, dbias, partial] = start_next_and_wait(dweight_, dbias_, partial_);
    sum_columns(blockIdx.y ? dbias : dweight, partial + blockIdx.y * rows * C, rows, C, accumulate);
}

int64_t backward_workspace(const Call& c) {
    return int64_t{2} * layernorm_backward_shape(c["N"], c["C"], c.launch.threads).blocks * c["C"] * 4;
}

template <class T, class G>
void layernorm_backward_vectorized(View<T, 2> dx, View<G, 1> dweight, View<G, 1> dbias, View<T, 2> out,
                                   View<const T, 2> dout, View<const T, 2> x, View<const T, 1> weight,
                                   View<const T, 1> bias, View<const float, 1> mean,
                                   View<const float, 1> rstd, View<const T, 2> dresidual, bool accumulate,
                                   LaunchContext context) {
    const int64_t N = x.shape[0], C = x.shape[1];
    const BackwardShape shape = layernorm_backward_shape(N, C, context.threads);
    const bool whole = is_whole(
        {dx.data, out.data, dout.data, x.data, weight.data, bias.data, dresidual.data}, C, vector_size<T>);
    const size_t sums_bytes = shape.threads.y > 1 ? static_cast<size_t>(C) * sizeof(float) : 0;
    const size_t lds =
        std::max(sums_bytes,
                 whole ? size_t{LayerNormRowsInLds<T, true>::bytes} * shape.threads.x * shape.threads.y : 0);
    float* const partial = static_cast<float*>(context.workspace);
    const auto kernel = whole ? out ? layernorm_backward_vectorized_kernel<T, true, true>
                                    : layernorm_backward_vectorized_kernel<T, true, false>
                        : out ? layernorm_backward_vectorized_kernel<T, false, true>
                              : layernorm_backward_vectorized_kernel<T, false, false>;
    launch(Grid(shape.blocks, shape.threads, context.stream, lds), kernel, dx.data, partial, out.data,
           dout.data, x.data, weight.data, bias.data, mean.data, rstd.data, dresidual.data, N,
           static_cast<int>(C), 1.0f / static_cast<float>(C));
    launch(columns_grid(C, context.stream, 2), layernorm_backward_vectorized_kernel_columns<G>, dweight.data,
           dbias.data, partial, shape.blocks, C, accumulate);
}

Operation layernorm_forward(
    "layernorm_forward<T: f32 bf16 fp16 f64, A: arithmetic(T)>"
    "(out: T[N,C], mean: A[N], rstd: A[N]; x: T[N,C], weight: T[C], bias: T[C]; eps: float {1e-5, 1e-6})"
    " rows(N) empty(N) test(N=9, C=192) test(N=9, C=384) test(N=5, C=768)"
    " test(N=3, C=2048) test(N=2, C=8192) test(N=2, C=16384)"
    " derivative layernorm_backward(dx: grad x, dweight: grad weight, dbias: grad bias;"
    " dout: grad out, x, weight, bias, mean, rstd)",
    "out = (x - mean(x)) / std(x) * weight + bias",
    {{"cpu", "rows over threads, vector lanes over columns",
      instantiations<LLAMAC_FLOATS(layernorm_forward_cpu)>()},
     {"vectorized", "one block per row, which stays in registers, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(layernorm_forward_vectorized)>(), forward_fits, blocks_of(128, 256, 512)},
     {"naive", "one thread per row", instantiations<LLAMAC_KERNELS(layernorm_forward_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(layernorm_forward_reference), layernorm_forward_reference<double>>()}},
    [](const Call& c) { return 7.0 * c["N"] * c["C"]; });

Operation residual_layernorm_forward(
    "residual_layernorm_forward<T: f32 bf16 fp16 f64, A: arithmetic(T)>"
    "(sum: T[N,C] may_share(x, residual), out: T[N,C], mean: A[N], rstd: A[N];"
    " x: T[N,C], residual: T[N,C], weight: T[C], bias: T[C]; eps: float {1e-5, 1e-6}) rows(N) empty(N)"
    " test(N=9, C=192) test(N=9, C=384) test(N=5, C=768)"
    " test(N=3, C=2048) test(N=2, C=8192) test(N=2, C=16384)"
    " derivative layernorm_backward(dx: grad x, dweight: grad weight, dbias: grad bias;"
    " dout: grad out, x: sum, weight, bias, mean, rstd, dresidual: grad sum)"
    " grad residual = grad x",
    "sum = x + residual, out = (sum - mean(sum)) / std(sum) * weight + bias",
    {{"cpu", "rows over threads, vector lanes over columns",
      instantiations<LLAMAC_FLOATS(residual_layernorm_forward_cpu)>()},
     {"vectorized", "one block per row, which stays in registers, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(residual_layernorm_forward_vectorized)>(), forward_fits,
      blocks_of(128, 256, 512)},
     {"naive", "one thread per row", instantiations<LLAMAC_KERNELS(residual_layernorm_forward_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(residual_layernorm_forward_reference),
                     residual_layernorm_forward_reference<double>>()}},
    [](const Call& c) { return 8.0 * c["N"] * c["C"]; });

Operation layernorm_backward(
    "layernorm_backward<T: f32 bf16 fp16 f64, A: arithmetic(T), G: f32 bf16 f64>"
    "(dx: T[N,C] may_share(dresidual, dout), dweight: G[C] adds_if(accumulate),"
    " dbias: G[C] adds_if(accumulate), out?: T[N,C];"
    " dout: T[N,C], x: T[N,C], weight: T[C], bias?: T[C], mean: A[N], rstd: A[N], dresidual?: T[N,C];"
    " accumulate: bool) rows(N) empty(N) test(N=26, C=4096) test(N=101, C=64)",
    "gradients of layernorm_forward, and of residual_layernorm_forward with the sum as x",
    {{"cpu", "rows over threads; dweight and dbias by blocks of rows",
      instantiations<LLAMAC_FLOATS(layernorm_backward_cpu, float), layernorm_backward_cpu<bf16, bf16>>()},
     {"vectorized", "rows in registers, 128-bit accesses, dweight and dbias as partial rows per block",
      instantiations<LLAMAC_KERNELS(layernorm_backward_vectorized, float),
                     layernorm_backward_vectorized<bf16, bf16>>(),
      backward_fits,
      // On an H200, 512 threads reach 96% of a copy, 256 90%.
      blocks_of(512, layernorm_backward_threads == 512 ? 256 : 1024, layernorm_backward_threads / 4),
      backward_workspace},
     {"naive", "one thread per row, one thread per column for dweight and dbias",
      instantiations<LLAMAC_KERNELS(layernorm_backward_naive, float),
                     layernorm_backward_naive<bf16, bf16>>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(layernorm_backward_reference, float),
                     layernorm_backward_reference<bf16, bf16>,
                     layernorm_backward_reference<double, double>>()}},
    [](const Call& c) { return 13.0 * c["N"] * c["C"]; });

}  // namespace
}  // namespace llamac
