// Matmul by its formulas, one thread per element of the result: variant `naive` of matmul.hip. Sums are double: one long chain
// of float additions would be less exact than any BLAS.
#include "core/device.h"
#include "ops/matmul/matmul.h"

namespace llamac {
namespace {

template <class T>
__global__ void matmul_forward_naive_kernel(T* out, const T* x, const T* weight, const T* residual,
                                            const T* bias, int64_t N, int64_t C, int64_t K) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, n = i / K, k = i % K;
    if (n >= N) return;
    double sum = residual ? double(float(residual[i])) : 0.0;
    if (bias) sum += double(float(bias[k]));
    for (int64_t c = 0; c < C; c++) sum += double(float(x[n * C + c]) * float(weight[k * C + c]));
    out[i] = T(static_cast<float>(sum));
}

template <class T>
__global__ void matmul_backward_input_naive_kernel(T* dx, const T* dout, const T* weight, int64_t N,
                                                   int64_t C, int64_t K, bool accumulate) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, n = i / C, c = i % C;
    if (n >= N) return;
    double sum = accumulate ? double(float(dx[i])) : 0.0;
    for (int64_t k = 0; k < K; k++) sum += double(float(dout[n * K + k]) * float(weight[k * C + c]));
    dx[i] = T(static_cast<float>(sum));
}

template <class T, class G>
__global__ void matmul_backward_weight_naive_kernel(G* dweight, const T* dout, const T* x, int64_t N,
                                                    int64_t C, int64_t K, bool accumulate) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, k = i / C, c = i % C;
    if (k >= K) return;
    double sum = accumulate ? double(float(dweight[i])) : 0.0;
    for (int64_t n = 0; n < N; n++) sum += double(float(dout[n * K + k]) * float(x[n * C + c]));
    dweight[i] = G(static_cast<float>(sum));
}

template <class T>
void matmul_forward_naive(View<T, 2> out, View<const T, 2> x, View<const T, 2> weight,
                          View<const T, 2> residual, View<const T, 1> bias, LaunchContext context) {
    const int64_t N = x.shape[0], C = x.shape[1], K = weight.shape[0];
    launch(context.grid(N * K), matmul_forward_naive_kernel<T>, out.data, x.data, weight.data, residual.data,
           bias.data, N, C, K);
}

template <class T>
void matmul_backward_input_naive(View<T, 2> dx, View<const T, 2> dout, View<const T, 2> weight,
                                 bool accumulate, LaunchContext context) {
    const int64_t N = dout.shape[0], K = dout.shape[1], C = weight.shape[1];
    launch(context.grid(N * C), matmul_backward_input_naive_kernel<T>, dx.data, dout.data, weight.data, N, C,
           K, accumulate);
}

template <class T, class G>
void matmul_backward_weight_naive(View<G, 2> dweight, View<const T, 2> dout, View<const T, 2> x,
                                  bool accumulate, LaunchContext context) {
    const int64_t N = x.shape[0], C = x.shape[1], K = dout.shape[1];
    launch(context.grid(K * C), matmul_backward_weight_naive_kernel<T, G>, dweight.data, dout.data, x.data, N,
           C, K, accumulate);
}

}  // namespace

MatmulVariants naive_matmul() {
    return matmul_variants({"naive", "one thread per element", {}},
                           instantiations<LLAMAC_FLOATS(matmul_forward_naive)>(),
                           instantiations<LLAMAC_FLOATS(matmul_backward_input_naive)>(),
                           instantiations<LLAMAC_FLOATS(matmul_backward_weight_naive, float),
                                          matmul_backward_weight_naive<bf16, bf16>>());
}

}  // namespace llamac
