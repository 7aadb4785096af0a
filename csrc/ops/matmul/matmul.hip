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
// blas:       the system's CBLAS, f32 and f64 (cpu.hip).
// naive:      one thread per element of the result (naive.hip).
// tiled:      a block keeps its part of the result in registers (tiled.hip; tiled.h explains how a GEMM is tiled).
// vectorized: forward, of one row: the weight is read once, by 128-bit accesses (vectorized.hip).
// library:    the vendor's, where the build found it (library.hip).
//
// Measured: docs/benchmarks/nvidia-h200.md, docs/benchmarks/cpu.md, docs/log/gemm.md.
#include "ops/matmul/matmul.h"

#include <algorithm>
#include <array>

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

// The tests stand beside the kernels.
constexpr Constraints tiled_constraints{
    "C and K multiples of 8 and at most 2^23, N at most 2^30, operands aligned to 16 bytes", tiled_supports};
constexpr Constraints forward_library_constraints{
    "a product that the library takes, operands aligned to 16 bytes, out not in the residual's memory",
    library_supports_forward};
constexpr const char* library_words = "a product that the library takes, operands aligned to 16 bytes";
constexpr Constraints backward_input_library_constraints{library_words, library_supports_backward_input};
constexpr Constraints backward_weight_library_constraints{library_words, library_supports_backward_weight};

constexpr Constraints few_rows_constraints{"N at most 4", few_rows_supports};
constexpr Constraints vectorized_constraints{
    "N = 1, rows of whole 16-byte vectors, x and weight aligned to 16 bytes", vectorized_supports};

// The launchers of one of the three products.
struct Launchers {
    std::span<const Instantiation> few_rows = {};  // of the forward product alone
    std::span<const Instantiation> cpu, blas;
    std::span<const Instantiation> vectorized = {};  // likewise
    std::span<const Instantiation> library, tiled, naive, reference;
    Constraints library_constraints;
};
std::array<Variant, 8> variants_of(const Launchers& of) {
    return {{
        {"few_rows", "dot products with weights as they lie", of.few_rows, few_rows_constraints},
        {"cpu", "packed product, register tiles", of.cpu},
        {.name = "blas",
         .idea = "the system's CBLAS",
         .instantiations = of.blas,
         .bits_depend_on_threads = true},
        {"vectorized", "one to four warps per row of the weight, 128-bit accesses", of.vectorized,
         vectorized_constraints, blocks_of(128, 256, 512)},
        {.name = "library",
         .idea = "the vendor's library (hipBLASLt, cuBLASLt), the fastest of its candidates",
         .instantiations = of.library,
         .supports = of.library_constraints,
         .workspace = library_workspace},
        {"tiled", "blocks on matrix cores, copies ahead of use, 128-bit accesses", of.tiled,
         tiled_constraints},
        {"naive", "one thread per element", of.naive},
        {"reference", "plain loops", of.reference},
    }};
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
    variants_of(
        {.few_rows =
             instantiations<LLAMAC_FLOATS(matmul_forward_few_rows), matmul_forward_few_rows<double>>(),
         .cpu = instantiations<LLAMAC_FLOATS(matmul_forward_cpu), matmul_forward_cpu<double>>(),
         .blas = blas_instantiations().forward,
         .vectorized = instantiations<LLAMAC_FLOATS(matmul_forward_vectorized)>(),
         .library = library_instantiations().forward,
         .tiled = instantiations<matmul_forward_tiled<bf16>, matmul_forward_tiled<fp16>>(),
         .naive = instantiations<LLAMAC_FLOATS(matmul_forward_naive)>(),
         .reference =
             instantiations<LLAMAC_FLOATS(matmul_forward_reference), matmul_forward_reference<double>>(),
         .library_constraints = forward_library_constraints}),
    flops);

Operation matmul_backward_input(
    "matmul_backward_input<T: f32 bf16 fp16 f64>"
    "(dx: T[N,C] adds_if(accumulate); dout: T[N,K], weight: T[K,C]; accumulate: bool = 0) rows(N) "
    "empty(N)" LLAMAC_MATMUL_TESTS,
    "dx += dout * weight",
    variants_of(
        {.cpu = instantiations<LLAMAC_FLOATS(matmul_backward_input_cpu), matmul_backward_input_cpu<double>>(),
         .blas = blas_instantiations().backward_input,
         .library = library_instantiations().backward_input,
         .tiled = instantiations<matmul_backward_input_tiled<bf16>, matmul_backward_input_tiled<fp16>>(),
         .naive = instantiations<LLAMAC_FLOATS(matmul_backward_input_naive)>(),
         .reference = instantiations<LLAMAC_FLOATS(matmul_backward_input_reference),
                                     matmul_backward_input_reference<double>>(),
         .library_constraints = backward_input_library_constraints}),
    flops);

Operation matmul_backward_weight(
    "matmul_backward_weight<T: f32 bf16 fp16 f64, G: f32 bf16 f64>"
    "(dweight: G[K,C] adds_if(accumulate); dout: T[N,K], x: T[N,C]; accumulate: bool)"
    " rows(N) empty(N)" LLAMAC_MATMUL_TESTS,
    "dweight = transposed dout * x",
    variants_of({.cpu = instantiations<LLAMAC_FLOATS(matmul_backward_weight_cpu, float),
                                       matmul_backward_weight_cpu<bf16, bf16>,
                                       matmul_backward_weight_cpu<double, double>>(),
                 .blas = blas_instantiations().backward_weight,
                 .library = library_instantiations().backward_weight,
                 .tiled = instantiations<matmul_backward_weight_tiled<bf16, float>,
                                         matmul_backward_weight_tiled<fp16, float>,
                                         matmul_backward_weight_tiled<bf16, bf16>>(),
                 .naive = instantiations<LLAMAC_FLOATS(matmul_backward_weight_naive, float),
                                         matmul_backward_weight_naive<bf16, bf16>>(),
                 .reference = instantiations<LLAMAC_FLOATS(matmul_backward_weight_reference, float),
                                             matmul_backward_weight_reference<bf16, bf16>,
                                             matmul_backward_weight_reference<double, double>>(),
                 .library_constraints = backward_weight_library_constraints}),
    flops);

}  // namespace
}  // namespace llamac
