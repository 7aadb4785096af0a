// RMSNorm (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019): every row is divided by its
// root mean square and scaled by a weight a column.
//
//   rstd[n]   = 1 / sqrt(mean_c x[n,c]^2 + eps)
//   out[n,c]  = x[n,c] * rstd[n] * weight[c]
//
//   with g[n,c] = dout[n,c] * weight[c] and xhat = x * rstd:
//   dx[n,c]    = rstd[n] * (g[n,c] - xhat[n,c] * mean_c(g[n,c] * xhat[n,c])) (+ dresidual[n,c], the
//                gradient that reaches x past the norm)
//   dweight[c] = sum_n dout[n,c] * xhat[n,c]
//
// residual_rmsnorm_forward: sum = x + residual, rounded to storage first, then the norm of that sum, so that
// backward, which reads the stored sum, sees the same rows.
//
// sum may be x's or residual's memory, dx may be dresidual's or dout's.
//
// reference: plain loops. Sums over a row or a column are double whatever the storage: a serial float sum of
//            some thousand terms loses more than PyTorch's, which adds in vector lanes.
// cpu:       rows over threads, a row stays in the first cache between its two passes. dweight is summed over
//            blocks of rows that N alone determines, then over the blocks, so that the bits do not depend on
//            the threads.
#include <algorithm>
#include <cmath>

#include "core/registry.h"
#include "core/simd.h"

namespace llamac {
namespace {

template <class T>
void rmsnorm_forward_reference(View<T, 2> out, View<arithmetic<T>, 1> rstd, View<const T, 2> x,
                               View<const T, 1> weight, double eps) {
    using A = arithmetic<T>;
    const int64_t N = x.shape[0], C = x.shape[1];
    for (int64_t n = 0; n < N; n++) {
        double sum = 0;
        for (int64_t c = 0; c < C; c++) sum += double(x(n, c)) * double(x(n, c));
        const A r = A(1 / std::sqrt(sum / double(C) + eps));
        for (int64_t c = 0; c < C; c++) out(n, c) = T(A(x(n, c)) * r * A(weight(c)));
        rstd(n) = r;
    }
}

template <class T>
void residual_rmsnorm_forward_reference(View<T, 2> sum, View<T, 2> out, View<arithmetic<T>, 1> rstd,
                                        View<const T, 2> x, View<const T, 2> residual,
                                        View<const T, 1> weight, double eps) {
    using A = arithmetic<T>;
    const int64_t N = x.shape[0], C = x.shape[1];
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) sum(n, c) = T(A(x(n, c)) + A(residual(n, c)));
    const View<const T, 2> rows{sum.data, {N, C}, {sum.stride[0], sum.stride[1]}};
    rmsnorm_forward_reference<T>(out, rstd, rows, weight, eps);
}

template <class T, class G>
void rmsnorm_backward_reference(View<T, 2> dx, View<G, 1> dweight, View<const T, 2> dout, View<const T, 2> x,
                                View<const T, 1> weight, View<const arithmetic<T>, 1> rstd,
                                View<const T, 2> dresidual, bool accumulate) {
    using A = arithmetic<T>;
    const int64_t N = x.shape[0], C = x.shape[1];
    std::vector<double> dw(C, 0);
    for (int64_t n = 0; n < N; n++) {
        double dot = 0;
        for (int64_t c = 0; c < C; c++) {
            const A xhat = A(x(n, c)) * rstd(n);
            dot += double(A(dout(n, c)) * A(weight(c))) * double(xhat);
            dw[c] += double(dout(n, c)) * double(xhat);
        }
        const A mean = A(dot / double(C));
        for (int64_t c = 0; c < C; c++) {
            const A g = A(dout(n, c)) * A(weight(c)), xhat = A(x(n, c)) * rstd(n);
            const A past = dresidual ? A(dresidual(n, c)) : A(0);
            dx(n, c) = T(rstd(n) * (g - xhat * mean) + past);
        }
    }
    for (int64_t c = 0; c < C; c++) dweight(c) = G(A((accumulate ? double(dweight(c)) : 0.0) + dw[c]));
}

template <class T>
float normalise_row(T* out, const T* x, const T* weight, int64_t C, double eps) {
    const double sum = block_sum(C, [x](int64_t c) { return float(x[c]) * float(x[c]); });
    const float r = static_cast<float>(1 / std::sqrt(sum / static_cast<double>(C) + eps));
#pragma omp simd
    for (int64_t c = 0; c < C; c++) store(out + c, float(x[c]) * r * float(weight[c]));
    return r;
}

template <class T>
void rmsnorm_forward_cpu(View<T, 2> out, View<float, 1> rstd, View<const T, 2> x, View<const T, 1> weight,
                         double eps) {
    const int64_t N = x.shape[0], C = x.shape[1];
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) rstd(n) = normalise_row(&out(n, 0), &x(n, 0), weight.data, C, eps);
}

template <class T>
void residual_rmsnorm_forward_cpu(View<T, 2> sum, View<T, 2> out, View<float, 1> rstd, View<const T, 2> x,
                                  View<const T, 2> residual, View<const T, 1> weight, double eps) {
    const int64_t N = x.shape[0], C = x.shape[1];
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        const T *a = &x(n, 0), *b = &residual(n, 0);
        T* s = &sum(n, 0);
#pragma omp simd
        for (int64_t c = 0; c < C; c++) store(s + c, float(a[c]) + float(b[c]));
        rstd(n) = normalise_row(&out(n, 0), s, weight.data, C, eps);
    }
}

// One row of the backward pass; dw[C] gathers its share of dweight. past: dresidual's row, or null.
template <class T>
void rmsnorm_backward_row(T* dx, float* dw, const T* dout, const T* x, const T* weight, float r,
                          const T* past, int64_t C) {
    const double dot =
        block_sum(C, [=](int64_t c) { return float(dout[c]) * float(weight[c]) * (float(x[c]) * r); });
    const float mean = static_cast<float>(dot / static_cast<double>(C));
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
        const float d = float(dout[c]), xhat = float(x[c]) * r;
        dw[c] += d * xhat;
        store(dx + c, r * (d * float(weight[c]) - xhat * mean) + (past ? float(past[c]) : 0.0f));
    }
}

template <class T, class G>
void rmsnorm_backward_cpu(View<T, 2> dx, View<G, 1> dweight, View<const T, 2> dout, View<const T, 2> x,
                          View<const T, 1> weight, View<const float, 1> rstd, View<const T, 2> dresidual,
                          bool accumulate) {
    const int64_t N = x.shape[0], C = x.shape[1];
    const int64_t rows = std::max<int64_t>(32, (N + 63) / 64), blocks = (N + rows - 1) / rows;
    std::vector<float> partial(blocks * C, 0.0f);
#pragma omp parallel for
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t n = b * rows; n < std::min(N, (b + 1) * rows); n++)
            rmsnorm_backward_row(&dx(n, 0), &partial[b * C], &dout(n, 0), &x(n, 0), weight.data, rstd(n),
                                 dresidual ? &dresidual(n, 0) : nullptr, C);
    std::vector<float> dw(C, 0.0f);
    for (int64_t b = 0; b < blocks; b++)
#pragma omp simd
        for (int64_t c = 0; c < C; c++) dw[c] += partial[b * C + c];
    for (int64_t c = 0; c < C; c++) dweight(c) = G((accumulate ? float(dweight(c)) : 0.0f) + dw[c]);
}

Operation rmsnorm_forward("rmsnorm_forward(out: T[N,C], rstd: A[N]; x: T[N,C], weight: T[C]; eps: float)",
                          "out = x / rms(x) * weight",
                          {{"cpu", "rows over threads, vector lanes over columns", Where::host,
                            entries<rmsnorm_forward_cpu<float>, rmsnorm_forward_cpu<bf16>>()},
                           {"reference", "plain loops", Where::host,
                            entries<rmsnorm_forward_reference<float>, rmsnorm_forward_reference<bf16>,
                                    rmsnorm_forward_reference<double>>()}},
                          [](const Call& c) { return 4.0 * c["N"] * c["C"]; });

Operation residual_rmsnorm_forward(
    "residual_rmsnorm_forward(sum: T[N,C], out: T[N,C], rstd: A[N];"
    " x: T[N,C], residual: T[N,C], weight: T[C]; eps: float)",
    "sum = x + residual, out = sum / rms(sum) * weight",
    {{"cpu", "rows over threads, vector lanes over columns", Where::host,
      entries<residual_rmsnorm_forward_cpu<float>, residual_rmsnorm_forward_cpu<bf16>>()},
     {"reference", "plain loops", Where::host,
      entries<residual_rmsnorm_forward_reference<float>, residual_rmsnorm_forward_reference<bf16>,
              residual_rmsnorm_forward_reference<double>>()}},
    [](const Call& c) { return 5.0 * c["N"] * c["C"]; });

Operation rmsnorm_backward(
    "rmsnorm_backward(dx: T[N,C], dweight +=: G[C];"
    " dout: T[N,C], x: T[N,C], weight: T[C], rstd: A[N], dresidual?: T[N,C]; accumulate: bool)",
    "gradients of rmsnorm_forward, and of residual_rmsnorm_forward with the sum as x",
    {{"cpu", "rows over threads; dweight by blocks of rows", Where::host,
      entries<rmsnorm_backward_cpu<float, float>, rmsnorm_backward_cpu<bf16, bf16>,
              rmsnorm_backward_cpu<bf16, float>>()},
     {"reference", "plain loops", Where::host,
      entries<rmsnorm_backward_reference<float, float>, rmsnorm_backward_reference<bf16, bf16>,
              rmsnorm_backward_reference<bf16, float>, rmsnorm_backward_reference<double, double>>()}},
    [](const Call& c) { return 10.0 * c["N"] * c["C"]; });

}  // namespace
}  // namespace llamac
