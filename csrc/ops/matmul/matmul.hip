// Matrix multiplication of a linear layer, weight[K,C] as in PyTorch and Hugging Face ([out, in]).
//
//   out[n,k]     = sum_c x[n,c] * weight[k,c]  (+ residual[n,k]) (+ bias[k])
//   dx[n,c]      = sum_k dout[n,k] * weight[k,c]      (+ dx[n,c], if it accumulates)
//   dweight[k,c] = sum_n dout[n,k] * x[n,c]    (+ dweight[k,c], if it accumulates)
//
// reference:  plain loops.
// cpu:        our own packed product (core/cpu_gemm.h): reads bf16 as it packs, adds the residual or the old gradient as it
//             stores (cpu.hip).
// few_rows:   forward, of up to four rows: each weight is read once, where it lies (cpu.hip).
// naive:      one thread per element of the result (naive.hip).
// tiled:      a block keeps its part of the result in registers (tiled.hip; tiled.h explains how a GEMM is tiled).
// vectorized: forward, of one row: the weight is read once, by 128-bit accesses (vectorized.hip).
// library:    the vendor's, where the build found it (library.hip).
//
// Measured: docs/benchmarks/nvidia-h200.md, docs/benchmarks/cpu.md, docs/log/gemm.md.
#include "ops/matmul/matmul.h"

#include <algorithm>

namespace llamac {
namespace {

// sum_i term(i) in runs of 128: one long chain of float additions would be less exact than any BLAS.
template <class A, class Term>
A sum_of(int64_t count, Term term) {
    A total = 0;
    for (int64_t begin = 0; begin < count; begin += 128) {
        A sum = 0;
        for (int64_t i = begin; i < std::min(count, begin + 128); i++) sum += term(i);
        total += sum;
    }
    return total;
}

template <class T>
void matmul_forward_reference(View<T, 2> out, View<const T, 2> x, View<const T, 2> weight,
                              View<const T, 2> residual, View<const T, 1> bias) {
    using A = arithmetic<T>;
    const int64_t N = x.shape[0], C = x.shape[1], K = weight.shape[0];
    for (int64_t n = 0; n < N; n++)
        for (int64_t k = 0; k < K; k++) {
            const A sum = sum_of<A>(C, [&](int64_t c) { return A(x(n, c)) * A(weight(k, c)); });
            out(n, k) = T(sum + (residual ? A(residual(n, k)) : A(0)) + (bias ? A(bias(k)) : A(0)));
        }
}

template <class T>
void matmul_backward_input_reference(View<T, 2> dx, View<const T, 2> dout, View<const T, 2> weight,
                                     bool accumulate) {
    using A = arithmetic<T>;
    const int64_t N = dout.shape[0], K = dout.shape[1], C = weight.shape[1];
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) {
            const A sum = sum_of<A>(K, [&](int64_t k) { return A(dout(n, k)) * A(weight(k, c)); });
            dx(n, c) = T(sum + (accumulate ? A(dx(n, c)) : A(0)));
        }
}

template <class T, class G>
void matmul_backward_weight_reference(View<G, 2> dweight, View<const T, 2> dout, View<const T, 2> x,
                                      bool accumulate) {
    using A = arithmetic<T>;
    const int64_t N = x.shape[0], C = x.shape[1], K = dout.shape[1];
    for (int64_t k = 0; k < K; k++)
        for (int64_t c = 0; c < C; c++) {
            const A sum = sum_of<A>(N, [&](int64_t n) { return A(dout(n, k)) * A(x(n, c)); });
            dweight(k, c) = G(sum + (accumulate ? A(dweight(k, c)) : A(0)));
        }
}

double flops(const Call& call) {
    return 2.0 * static_cast<double>(call["N"] * call["C"]) * static_cast<double>(call["K"]);
}

// Cases for tiles: whole ones, parts of one in each direction, many.
#define LLAMAC_MATMUL_TESTS                                                                           \
    " test(N=128, C=96, K=256) test(N=200, C=328, K=136) test(N=40, C=520, K=264)"                    \
    " test(N=2184, C=72, K=136)"                                                                      \
    " test(N=1, C=2050, K=131) test(N=1, C=2056, K=131) test(N=1, C=8, K=37) test(N=1, C=4104, K=66)" \
    " test(N=1, C=17408, K=35) test_large(N=1000, C=1032, K=520)"

Operation matmul_forward(
    "matmul_forward<T: f32 bf16 fp16 f64>"
    "(out: T[N,K] may_share(residual); x: T[N,C], weight: T[K,C], residual?: T[N,K], bias?: T[K])"
    " rows(N) empty(N)"
    " derivative matmul_backward_input(dx: grad x; dout: grad out, weight)"
    " derivative matmul_backward_weight(dweight: grad weight; dout: grad out, x)"
    " derivative bias_backward(dbias: grad bias; dout: grad out)"
    " grad residual = grad out" LLAMAC_MATMUL_TESTS,
    "out = x * transposed weight (+ residual) (+ bias)",
    {few_rows_matmul_forward(),
     cpu_matmul().forward,
     vectorized_matmul_forward(),
     library_matmul().forward,
     tiled_matmul().forward,
     naive_matmul().forward,
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(matmul_forward_reference), matmul_forward_reference<double>>()}},
    flops);

Operation matmul_backward_input(
    "matmul_backward_input<T: f32 bf16 fp16 f64>"
    "(dx: T[N,C] adds_if(accumulate); dout: T[N,K], weight: T[K,C]; accumulate: bool = 0) rows(N) "
    "empty(N)" LLAMAC_MATMUL_TESTS,
    "dx += dout * weight",
    {cpu_matmul().backward_input,
     library_matmul().backward_input,
     tiled_matmul().backward_input,
     naive_matmul().backward_input,
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(matmul_backward_input_reference),
                     matmul_backward_input_reference<double>>()}},
    flops);

Operation matmul_backward_weight(
    "matmul_backward_weight<T: f32 bf16 fp16 f64, G: f32 bf16 f64>"
    "(dweight: G[K,C] adds_if(accumulate); dout: T[N,K], x: T[N,C]; accumulate: bool)"
    " rows(N) empty(N)" LLAMAC_MATMUL_TESTS,
    "dweight = transposed dout * x",
    {cpu_matmul().backward_weight,
     library_matmul().backward_weight,
     tiled_matmul().backward_weight,
     naive_matmul().backward_weight,
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(matmul_backward_weight_reference, float),
                     matmul_backward_weight_reference<bf16, bf16>,
                     matmul_backward_weight_reference<double, double>>()}},
    flops);

}  // namespace
}  // namespace llamac
