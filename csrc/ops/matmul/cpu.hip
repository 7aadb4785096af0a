// Matmul on the host: our own packed product (core/cpu_gemm.h) and the system's CBLAS, variants `cpu` and `blas`
// of matmul.hip.
#include <algorithm>

#include "core/cpu_gemm.h"
#include "ops/matmul/matmul.h"

namespace llamac {
namespace {

template <class T>
Matrix<T> matrix(View<const T, 2> v) {
    return {v.data, v.shape[1], 1};
}

// out[M,N] = initial + a * b, rounded once. Storage other than the arithmetic's goes through a block of rows,
// long enough that packing b again for each does not show.
template <class T, class O>
void product(int64_t M, int64_t N, int64_t K, Matrix<T> a, Matrix<T> b, const O* initial, O* out) {
    using A = arithmetic<T>;
    if constexpr (std::is_same_v<A, O>) {
        gemm<A>(M, N, K, a, b, initial, out);
    } else {
        constexpr int64_t block = 1024;
        static thread_local Scratch scratch;
        A* sums = scratch.reserve<A>(std::min(M, block) * N);
        for (int64_t i0 = 0; i0 < M; i0 += block) {
            const int64_t rows = std::min(block, M - i0);
            gemm<A>(rows, N, K, a.from(i0, 0), b, static_cast<const A*>(nullptr), sums);
#pragma omp parallel for
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < N; j++) {
                    const int64_t at = (i0 + i) * N + j;
                    out[at] = O((initial ? A(initial[at]) : A(0)) + sums[i * N + j]);
                }
        }
    }
}

}  // namespace

template <class T>
void matmul_forward_cpu(View<T, 2> out, View<const T, 2> x, View<const T, 2> weight,
                        View<const T, 2> residual) {
    product(out.shape[0], out.shape[1], x.shape[1], matrix(x), matrix(weight).transposed(),
            static_cast<const T*>(residual.data), out.data);
}

template <class T>
void matmul_backward_input_cpu(View<T, 2> dx, View<const T, 2> dout, View<const T, 2> weight) {
    product(dx.shape[0], dx.shape[1], dout.shape[1], matrix(dout), matrix(weight),
            static_cast<const T*>(nullptr), dx.data);
}

template <class T, class G>
void matmul_backward_weight_cpu(View<G, 2> dweight, View<const T, 2> dout, View<const T, 2> x,
                                bool accumulate) {
    product(dweight.shape[0], dweight.shape[1], x.shape[0], matrix(dout).transposed(), matrix(x),
            static_cast<const G*>(accumulate ? dweight.data : nullptr), dweight.data);
}

#ifdef LLAMAC_CBLAS
namespace {

template <class T>
void matmul_forward_blas(View<T, 2> out, View<const T, 2> x, View<const T, 2> weight,
                         View<const T, 2> residual) {
    cblas_gemm(out.shape[0], out.shape[1], x.shape[1], matrix(x), matrix(weight).transposed(), residual.data,
               out.data);
}

template <class T>
void matmul_backward_input_blas(View<T, 2> dx, View<const T, 2> dout, View<const T, 2> weight) {
    cblas_gemm(dx.shape[0], dx.shape[1], dout.shape[1], matrix(dout), matrix(weight),
               static_cast<const T*>(nullptr), dx.data);
}

template <class T>
void matmul_backward_weight_blas(View<T, 2> dweight, View<const T, 2> dout, View<const T, 2> x,
                                 bool accumulate) {
    cblas_gemm(dweight.shape[0], dweight.shape[1], x.shape[0], matrix(dout).transposed(), matrix(x),
               static_cast<const T*>(accumulate ? dweight.data : nullptr), dweight.data);
}

}  // namespace
#endif

LibraryEntries blas_instantiations() {
#ifdef LLAMAC_CBLAS
    return {instantiations<matmul_forward_blas<float>, matmul_forward_blas<double>>(),
            instantiations<matmul_backward_input_blas<float>, matmul_backward_input_blas<double>>(),
            instantiations<matmul_backward_weight_blas<float>, matmul_backward_weight_blas<double>>()};
#else
    return {};
#endif
}

template decltype(matmul_forward_cpu<float>) matmul_forward_cpu<float>;
template decltype(matmul_forward_cpu<bf16>) matmul_forward_cpu<bf16>;
template decltype(matmul_forward_cpu<double>) matmul_forward_cpu<double>;
template decltype(matmul_backward_input_cpu<float>) matmul_backward_input_cpu<float>;
template decltype(matmul_backward_input_cpu<bf16>) matmul_backward_input_cpu<bf16>;
template decltype(matmul_backward_input_cpu<double>) matmul_backward_input_cpu<double>;
template decltype(matmul_backward_weight_cpu<float, float>) matmul_backward_weight_cpu<float, float>;
template decltype(matmul_backward_weight_cpu<bf16, float>) matmul_backward_weight_cpu<bf16, float>;
template decltype(matmul_backward_weight_cpu<bf16, bf16>) matmul_backward_weight_cpu<bf16, bf16>;
template decltype(matmul_backward_weight_cpu<double, double>) matmul_backward_weight_cpu<double, double>;

}  // namespace llamac
