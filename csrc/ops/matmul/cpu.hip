// Matmul on the host: a packed product (core/cpu_gemm.h) and a product of few rows, variants `cpu` and `few_rows` of matmul.hip.
#include <algorithm>

#include "core/cpu_gemm.h"
#include "ops/matmul/matmul.h"

namespace llamac {
namespace {

template <class T>
Matrix<T> matrix(View<const T, 2> v) {
    return {v.data, v.shape[1], 1};
}

// out[M,N] += bias[N]; null: nothing.
template <class T, class O>
void add_to_rows(int64_t M, int64_t N, const T* bias, O* out) {
    if (!bias) return;
#pragma omp parallel for
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < N; j++) out[i * N + j] += O(bias[j]);
}

// out[M,N] = initial + a * b (+ bias[N]), rounded once, but for the bias where the sums are made in out. Storage other than the
// arithmetic's goes through a block of rows, long enough that packing b again for each does not show.
template <class T, class O>
void product(int64_t M, int64_t N, int64_t K, Matrix<T> a, Matrix<T> b, const O* initial, O* out,
             const T* bias = nullptr) {
    using A = arithmetic<T>;
    if constexpr (std::is_same_v<A, O>) {
        gemm<A>(M, N, K, a, b, initial, out);
        add_to_rows(M, N, bias, out);
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
                    out[at] =
                        O((initial ? A(initial[at]) : A(0)) + sums[i * N + j] + (bias ? A(bias[j]) : A(0)));
                }
        }
    }
}

template <class T>
void matmul_forward_cpu(View<T, 2> out, View<const T, 2> x, View<const T, 2> weight,
                        View<const T, 2> residual, View<const T, 1> bias) {
    product(out.shape[0], out.shape[1], x.shape[1], matrix(x), matrix(weight).transposed(),
            static_cast<const T*>(residual.data), out.data, bias.data);
}

// ---- few_rows: dot products of rows of x and rows of the weight, which is read once, as it lies

constexpr int64_t max_few_rows = 4;
constexpr int64_t weight_rows = 4;  // at a time: as many sums hide the latency of an addition

// Products: fewer take less time than waking the threads.
[[maybe_unused]] constexpr int64_t least_shared = int64_t{1} << 17;

// sums[i] = x * row i of `weight`, whose rows are C long. In runs of `run`, as a long chain of additions is less exact.
template <class A, class T>
inline void dot_products(const A* x, const T* weight, int64_t C, A (&sums)[weight_rows]) {
    constexpr int64_t run = 1024;
    const T *w0 = weight, *w1 = w0 + C, *w2 = w1 + C, *w3 = w2 + C;
    for (A& sum : sums) sum = 0;
    for (int64_t begin = 0; begin < C; begin += run) {
        const int64_t end = std::min(C, begin + run);
        A s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
        for (int64_t c = begin; c < end; c++) {
            s0 += x[c] * A(w0[c]);
            s1 += x[c] * A(w1[c]);
            s2 += x[c] * A(w2[c]);
            s3 += x[c] * A(w3[c]);
        }
        sums[0] += s0, sums[1] += s1, sums[2] += s2, sums[3] += s3;
    }
}
template <class A, class T>
inline A dot_product(const A* x, const T* weight, int64_t C) {
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < C; c++) sum += x[c] * A(weight[c]);
    return sum;
}

template <class T>
void matmul_forward_few_rows(View<T, 2> out, View<const T, 2> x, View<const T, 2> weight,
                             View<const T, 2> residual, View<const T, 1> bias) {
    using A = arithmetic<T>;
    const int64_t N = x.shape[0], C = x.shape[1], K = weight.shape[0];
    static thread_local Scratch scratch;
    A* const rows = scratch.reserve<A>(N * C);
    for (int64_t i = 0; i < N * C; i++) rows[i] = A(x.data[i]);
    const auto write = [&](int64_t n, int64_t k, A sum) {
        out(n, k) = T(sum + (residual ? A(residual(n, k)) : A(0)) + (bias ? A(bias(k)) : A(0)));
    };
    const int64_t whole = K / weight_rows;
#pragma omp parallel for schedule(static) if (N * K * C >= least_shared)
    for (int64_t block = 0; block < whole; block++)
        for (int64_t n = 0; n < N; n++) {
            A sums[weight_rows];
            dot_products(rows + n * C, &weight(block * weight_rows, 0), C, sums);
            for (int64_t i = 0; i < weight_rows; i++) write(n, block * weight_rows + i, sums[i]);
        }
    for (int64_t k = whole * weight_rows; k < K; k++)
        for (int64_t n = 0; n < N; n++) write(n, k, dot_product(rows + n * C, &weight(k, 0), C));
}

template <class T>
void matmul_backward_input_cpu(View<T, 2> dx, View<const T, 2> dout, View<const T, 2> weight,
                               bool accumulate) {
    product(dx.shape[0], dx.shape[1], dout.shape[1], matrix(dout), matrix(weight),
            static_cast<const T*>(accumulate ? dx.data : nullptr), dx.data);
}

template <class T, class G>
void matmul_backward_weight_cpu(View<G, 2> dweight, View<const T, 2> dout, View<const T, 2> x,
                                bool accumulate) {
    product(dweight.shape[0], dweight.shape[1], x.shape[0], matrix(dout).transposed(), matrix(x),
            static_cast<const G*>(accumulate ? dweight.data : nullptr), dweight.data);
}

}  // namespace

MatmulVariants cpu_matmul() {
    return matmul_variants(
        {"cpu", "packed product, register tiles", {}},
        instantiations<LLAMAC_FLOATS(matmul_forward_cpu), matmul_forward_cpu<double>>(),
        instantiations<LLAMAC_FLOATS(matmul_backward_input_cpu), matmul_backward_input_cpu<double>>(),
        instantiations<LLAMAC_FLOATS(matmul_backward_weight_cpu, float),
                       matmul_backward_weight_cpu<bf16, bf16>, matmul_backward_weight_cpu<double, double>>());
}

Variant few_rows_matmul_forward() {
    return {"few_rows", "dot products with weights as they lie",
            instantiations<LLAMAC_FLOATS(matmul_forward_few_rows), matmul_forward_few_rows<double>>(),
            Constraints{"N at most 4", [](const Call& c) { return c["N"] <= max_few_rows; }}};
}

}  // namespace llamac
