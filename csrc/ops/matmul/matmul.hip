// Matrix multiplication of a linear layer without bias, weight[K,C] as in PyTorch and Hugging Face
// ([out, in]).
//
//   out[n,k]     = sum_c x[n,c] * weight[k,c]  (+ residual[n,k])
//   dx[n,c]      = sum_k dout[n,k] * weight[k,c]
//   dweight[k,c] = sum_n dout[n,k] * x[n,c]    (+ what was there)
//
// cpu   our own packed product (core/blas.h): reads bf16 as it packs, adds the residual or the old gradient
//       as it stores
// blas  the system's CBLAS, f32 and f64
// library  the vendor's, where the build found it (library.hip)
// 2     tiled: a block keeps a piece of the result in registers (tiled.hip: how a GEMM is tiled)
// 1     naive: a thread an element of the result
//
// f32, one core of an AMD EPYC (Zen 4, AVX-512; a loop of nothing but FMA: 117 GFLOP/s), N = 2048, operands
// not in L2, GFLOP/s of forward / dx / dweight, November 2026; two threads do 1.8 to 2 times as much:
//
//      C     K   cpu           OpenBLAS 0.3.21   torch.mm 2.13 (MKL)
//    192   320   110/111/109   102/102/100       98/97/99
//    192   192   111/113/109   103/103/102       99/101/100
//    192  1024   107/108/94     98/96/95         91/95/89
//    512   192   105/109/100    97/98/97         92/95/95
//    192  4096   108/108/111    99/95/95         94/95/89
//
// NVIDIA H200, bf16, N = C = K = 8192, 2026-11-21, TFLOP/s of kernel 2 / torch.matmul (PyTorch 2.11, cuBLAS); in
// another run, library / torch.matmul: 672 / 672, 673 / 691, f32 683 / 687, bf16 678 / 706:
//
//   forward 440 / 799    backward_input 442 / 773    backward_weight f32 436, bf16 435 / 772
//
// The same, `library` in the step of a training run and alone: docs/benchmarks. Kernel 1, N=2048 K=C=4096: 139, 22 and 31 ms.
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
                              View<const T, 2> residual) {
    using A = arithmetic<T>;
    const int64_t N = x.shape[0], C = x.shape[1], K = weight.shape[0];
    for (int64_t n = 0; n < N; n++)
        for (int64_t k = 0; k < K; k++) {
            const A sum = sum_of<A>(C, [&](int64_t c) { return A(x(n, c)) * A(weight(k, c)); });
            out(n, k) = T(sum + (residual ? A(residual(n, k)) : A(0)));
        }
}

template <class T>
void matmul_backward_input_reference(View<T, 2> dx, View<const T, 2> dout, View<const T, 2> weight) {
    using A = arithmetic<T>;
    const int64_t N = dout.shape[0], K = dout.shape[1], C = weight.shape[1];
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++)
            dx(n, c) = T(sum_of<A>(K, [&](int64_t k) { return A(dout(n, k)) * A(weight(k, c)); }));
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
constexpr Limits tiled_limits{"C and K multiples of 8, N, C and K at most 2^30, operands aligned to 16 bytes",
                              tiled_supports};
#if defined(LLAMAC_BLASLT)
constexpr Limits forward_library_limits{
    "a product that the library takes, operands aligned to 16 bytes, out not in the residual's memory",
    library_supports_forward};
constexpr Limits backward_input_library_limits{
    "a product that the library takes, operands aligned to 16 bytes", library_supports_backward_input};
constexpr Limits backward_weight_library_limits{
    "a product that the library takes, operands aligned to 16 bytes", library_supports_backward_weight};
#endif

// What tiles want to see: whole ones, parts of one in each direction, many.
#define LLAMAC_MATMUL_TESTS                                                        \
    " test(N=128, C=96, K=256) test(N=200, C=328, K=136) test(N=40, C=520, K=264)" \
    " test(N=2184, C=72, K=136) test_large(N=1000, C=1032, K=520)"

Operation matmul_forward(
    "matmul_forward(out: T[N,K] may_share(residual); x: T[N,C], weight: T[K,C], residual?: T[N,K])"
    " rows(N) empty(N)"
    " derivative matmul_backward_input(dx: grad x; dout: grad out, weight)"
    " derivative matmul_backward_weight(dweight: grad weight; dout: grad out, x)"
    " grad residual = grad out" LLAMAC_MATMUL_TESTS,
    "out = x * transposed weight (+ residual)",
    {{"cpu", "packed product, register tiles", Where::host,
      entries<matmul_forward_cpu<float>, matmul_forward_cpu<bf16>, matmul_forward_cpu<double>>()},
#ifdef LLAMAC_CBLAS
     {.name = "blas",
      .idea = "the system's CBLAS",
      .where = Where::host,
      .entries = entries<matmul_forward_blas<float>, matmul_forward_blas<double>>(),
      .bits_depend_on_threads = true},
#endif
#if defined(LLAMAC_BLASLT)
     {"library",
      "the vendor's library (hipBLASLt, cuBLASLt), the fastest of its candidates",
      Where::device,
      entries<matmul_forward_library<float>, matmul_forward_library<bf16>>(),
      forward_library_limits,
      {},
      library_workspace},
#endif
     {"2", "tiled: blocks on matrix cores, copies ahead of use, 128-bit accesses", Where::device,
      entries<matmul_forward_2>(), tiled_limits},
     {"1", "naive: a thread an element", Where::device,
      entries<matmul_forward_1<float>, matmul_forward_1<bf16>>()},
     {"reference", "plain loops", Where::host,
      entries<matmul_forward_reference<float>, matmul_forward_reference<bf16>,
              matmul_forward_reference<double>>()}},
    flops);

Operation matmul_backward_input(
    "matmul_backward_input(dx: T[N,C]; dout: T[N,K], weight: T[K,C]) rows(N) empty(N)" LLAMAC_MATMUL_TESTS,
    "dx = dout * weight",
    {{"cpu", "packed product, register tiles", Where::host,
      entries<matmul_backward_input_cpu<float>, matmul_backward_input_cpu<bf16>,
              matmul_backward_input_cpu<double>>()},
#ifdef LLAMAC_CBLAS
     {.name = "blas",
      .idea = "the system's CBLAS",
      .where = Where::host,
      .entries = entries<matmul_backward_input_blas<float>, matmul_backward_input_blas<double>>(),
      .bits_depend_on_threads = true},
#endif
#if defined(LLAMAC_BLASLT)
     {"library",
      "the vendor's library (hipBLASLt, cuBLASLt), the fastest of its candidates",
      Where::device,
      entries<matmul_backward_input_library<float>, matmul_backward_input_library<bf16>>(),
      backward_input_library_limits,
      {},
      library_workspace},
#endif
     {"2", "tiled: blocks on matrix cores, copies ahead of use, 128-bit accesses", Where::device,
      entries<matmul_backward_input_2>(), tiled_limits},
     {"1", "naive: a thread an element", Where::device,
      entries<matmul_backward_input_1<float>, matmul_backward_input_1<bf16>>()},
     {"reference", "plain loops", Where::host,
      entries<matmul_backward_input_reference<float>, matmul_backward_input_reference<bf16>,
              matmul_backward_input_reference<double>>()}},
    flops);

Operation matmul_backward_weight(
    "matmul_backward_weight(dweight: G[K,C] adds_if(accumulate); dout: T[N,K], x: T[N,C]; accumulate: bool)"
    " rows(N) empty(N)" LLAMAC_MATMUL_TESTS,
    "dweight = transposed dout * x",
    {{"cpu", "packed product, register tiles", Where::host,
      entries<matmul_backward_weight_cpu<float, float>, matmul_backward_weight_cpu<bf16, float>,
              matmul_backward_weight_cpu<bf16, bf16>, matmul_backward_weight_cpu<double, double>>()},
#ifdef LLAMAC_CBLAS
     {.name = "blas",
      .idea = "the system's CBLAS",
      .where = Where::host,
      .entries = entries<matmul_backward_weight_blas<float>, matmul_backward_weight_blas<double>>(),
      .bits_depend_on_threads = true},
#endif
#if defined(LLAMAC_BLASLT)
     {"library",
      "the vendor's library (hipBLASLt, cuBLASLt), the fastest of its candidates",
      Where::device,
      entries<matmul_backward_weight_library<float, float>, matmul_backward_weight_library<bf16, float>,
              matmul_backward_weight_library<bf16, bf16>>(),
      backward_weight_library_limits,
      {},
      library_workspace},
#endif
     {"2", "tiled: blocks on matrix cores, copies ahead of use, 128-bit accesses", Where::device,
      entries<matmul_backward_weight_2<float>, matmul_backward_weight_2<bf16>>(), tiled_limits},
     {"1", "naive: a thread an element", Where::device,
      entries<matmul_backward_weight_1<float, float>, matmul_backward_weight_1<bf16, float>,
              matmul_backward_weight_1<bf16, bf16>>()},
     {"reference", "plain loops", Where::host,
      entries<matmul_backward_weight_reference<float, float>, matmul_backward_weight_reference<bf16, float>,
              matmul_backward_weight_reference<bf16, bf16>,
              matmul_backward_weight_reference<double, double>>()}},
    flops);

}  // namespace
}  // namespace llamac
