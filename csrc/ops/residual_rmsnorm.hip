// RMSNorm of a sum of two tensors: a branch's output and the residual stream.
//
//   sum[n,c]  = x[n,c] + residual[n,c]
//   rstd, out = rmsnorm_forward(sum)     rmsnorm.hip
//
// The sum is rounded to storage before its norm is taken: the backward pass, rmsnorm_backward, reads the stored sum. sum may be
// x's or residual's memory. The variants are those of rmsnorm_forward, which make the sum on the way.
//
// Measured: docs/benchmarks/nvidia-h200.md.
#include "ops/rmsnorm.h"

namespace llamac {
namespace {

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
        rstd(n) = normalize_row(&out(n, 0), s, weight.data, C, eps);
    }
}

// ---- naive

template <class T>
__global__ void residual_rmsnorm_forward_naive_kernel(T* sum, T* out, float* rstd, const T* x,
                                                      const T* residual, const T* weight, int64_t N,
                                                      int64_t C, float eps) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (n >= N) return;
    for (int64_t c = n * C; c < (n + 1) * C; c++) sum[c] = T(float(x[c]) + float(residual[c]));
    rstd[n] = normalize_row_naive(out + n * C, sum + n * C, weight, C, eps);
}

template <class T>
void residual_rmsnorm_forward_naive(View<T, 2> sum, View<T, 2> out, View<float, 1> rstd, View<const T, 2> x,
                                    View<const T, 2> residual, View<const T, 1> weight, double eps,
                                    LaunchContext context) {
    const int64_t N = x.shape[0], C = x.shape[1];
    launch(context.grid(N), residual_rmsnorm_forward_naive_kernel<T>, sum.data, out.data, rstd.data, x.data,
           residual.data, weight.data, N, C, eps);
}

// ---- vectorized

template <class T>
void residual_rmsnorm_forward_vectorized(View<T, 2> sum, View<T, 2> out, View<float, 1> rstd,
                                         View<const T, 2> x, View<const T, 2> residual,
                                         View<const T, 1> weight, double eps, LaunchContext context) {
    launch_forward<T, true>(sum.data, out, rstd.data, x, residual.data, weight.data, eps, context);
}

Operation residual_rmsnorm_forward(
    "residual_rmsnorm_forward<T: f32 bf16 fp16 f64, A: arithmetic(T)>"
    "(sum: T[N,C] may_share(x, residual), out: T[N,C], rstd: A[N];"
    " x: T[N,C], residual: T[N,C], weight: T[C]; eps: float {1e-5, 1e-6}) rows(N) empty(N)"
    " test(N=3, C=2048) test(N=2, C=8192) test(N=2, C=16384)"
    " derivative rmsnorm_backward(dx: grad x, dweight: grad weight;"
    " dout: grad out, x: sum, weight, rstd, dresidual: grad sum)"
    " grad residual = grad x",
    "sum = x + residual, out = sum / rms(sum) * weight",
    {{"cpu", "rows over threads, vector lanes over columns",
      instantiations<LLAMAC_FLOATS(residual_rmsnorm_forward_cpu)>()},
     {"vectorized", "one block per row, which stays in registers, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(residual_rmsnorm_forward_vectorized)>(), forward_fits, row_block_sizes},
     {"naive", "one thread per row", instantiations<LLAMAC_KERNELS(residual_rmsnorm_forward_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(residual_rmsnorm_forward_reference),
                     residual_rmsnorm_forward_reference<double>>()}},
    [](const Call& c) { return 5.0 * c["N"] * c["C"]; });

}  // namespace
}  // namespace llamac
