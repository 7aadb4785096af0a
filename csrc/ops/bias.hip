// A bias: the same row is added to all rows.
//
//   out[n,k] = x[n,k] + bias[k]
//   dbias[k] = sum_n dout[n,k]
//
// out may be x's memory. The gradient of x is dout.
//
// reference:  plain loops; the sum of a column is double.
// cpu:        rows over threads, vector lanes over columns; dbias is summed over blocks of rows, then over the blocks.
// naive:      one thread per element; backward one thread per column.
#include <vector>

#include "core/operation.h"
#include "core/simd.h"
#include "ops/column_sums.h"

namespace llamac {
namespace {

template <class T>
void bias_forward_reference(View<T, 2> out, View<const T, 2> x, View<const T, 1> bias) {
    using A = arithmetic<T>;
    for (int64_t n = 0; n < x.shape[0]; n++)
        for (int64_t k = 0; k < x.shape[1]; k++) out(n, k) = T(A(x(n, k)) + A(bias(k)));
}

template <class T, class G>
void bias_backward_reference(View<G, 1> dbias, View<const T, 2> dout, bool accumulate) {
    for (int64_t k = 0; k < dout.shape[1]; k++) {
        double sum = accumulate ? double(dbias(k)) : 0.0;
        for (int64_t n = 0; n < dout.shape[0]; n++) sum += double(dout(n, k));
        dbias(k) = G(arithmetic<T>(sum));
    }
}

template <class T>
void bias_forward_cpu(View<T, 2> out, View<const T, 2> x, View<const T, 1> bias) {
    const int64_t N = x.shape[0], K = x.shape[1];
#pragma omp parallel for if (N > 1)
    for (int64_t n = 0; n < N; n++)
#pragma omp simd
        for (int64_t k = 0; k < K; k++)
            store(out.data + n * K + k, float(x.data[n * K + k]) + float(bias.data[k]));
}

template <class T, class G>
void bias_backward_cpu(View<G, 1> dbias, View<const T, 2> dout, bool accumulate) {
    const int64_t N = dout.shape[0], K = dout.shape[1];
    const std::vector<float> sums = column_sums(N, K, [&](int64_t first, int64_t last, float* to) {
        for (int64_t n = first; n < last; n++)
#pragma omp simd
            for (int64_t k = 0; k < K; k++) to[k] += float(dout.data[n * K + k]);
    });
    for (int64_t k = 0; k < K; k++) dbias(k) = G((accumulate ? float(dbias(k)) : 0.0f) + sums[k]);
}

// ---- naive

template <class T>
__global__ void bias_forward_naive_kernel(T* out, const T* x, const T* bias, int64_t N, int64_t K) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < N * K) out[i] = T(float(x[i]) + float(bias[i % K]));
}

template <class T>
void bias_forward_naive(View<T, 2> out, View<const T, 2> x, View<const T, 1> bias, LaunchContext context) {
    const int64_t N = x.shape[0], K = x.shape[1];
    launch(context.grid(N * K), bias_forward_naive_kernel<T>, out.data, x.data, bias.data, N, K);
}

template <class T, class G>
__global__ void bias_backward_naive_kernel(G* dbias, const T* dout, int64_t N, int64_t K, bool accumulate) {
    const int64_t k = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (k >= K) return;
    double sum = accumulate ? double(float(dbias[k])) : 0.0;
    for (int64_t n = 0; n < N; n++) sum += double(float(dout[n * K + k]));
    dbias[k] = G(static_cast<float>(sum));
}

template <class T, class G>
void bias_backward_naive(View<G, 1> dbias, View<const T, 2> dout, bool accumulate, LaunchContext context) {
    const int64_t N = dout.shape[0], K = dout.shape[1];
    launch(context.grid(K), bias_backward_naive_kernel<T, G>, dbias.data, dout.data, N, K, accumulate);
}

Operation bias_forward(
    "bias_forward<T: f32 bf16 f64>(out: T[N,K] may_share(x); x: T[N,K], bias: T[K]) rows(N) empty(N)"
    " derivative bias_backward(dbias: grad bias; dout: grad out) grad x = grad out",
    "out = x + bias",
    {{"cpu", "rows over threads, vector lanes over columns",
      instantiations<LLAMAC_FLOATS(bias_forward_cpu)>()},
     {"naive", "one thread per element", instantiations<LLAMAC_FLOATS(bias_forward_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(bias_forward_reference), bias_forward_reference<double>>()}},
    [](const Call& c) { return 1.0 * c["N"] * c["K"]; });

Operation bias_backward(
    "bias_backward<T: f32 bf16 f64, G: f32 bf16 f64>"
    "(dbias: G[K] adds_if(accumulate); dout: T[N,K]; accumulate: bool) rows(N) empty(N)",
    "gradient of bias_forward's bias: the sums of dout's columns",
    {{"cpu", "blocks of rows over threads",
      instantiations<LLAMAC_FLOATS(bias_backward_cpu, float), bias_backward_cpu<bf16, bf16>>()},
     {"naive", "one thread per column",
      instantiations<LLAMAC_FLOATS(bias_backward_naive, float), bias_backward_naive<bf16, bf16>>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(bias_backward_reference, float), bias_backward_reference<bf16, bf16>,
                     bias_backward_reference<double, double>>()}},
    [](const Call& c) { return 1.0 * c["N"] * c["K"]; });

}  // namespace
}  // namespace llamac
