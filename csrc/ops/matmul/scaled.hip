// Matrix products of fp8 operands (core/fp8.h) with scales, as quantize and quantize_rows make them:
//
//   scaled_matmul:       out[n,k] = a_scale * b_scale * sum_c a[n,c] * b[k,c]  (+ residual[n,k]) (+ out[n,k], if it accumulates)
//   scaled_matmul_rows:  likewise with a_scale[n] * b_scale[k]
//
// The sum is in fp32, and the scales multiply it before anything is added. Both operands are contiguous along the summed
// dimension, as matrix units require for 8 bits. The three products of a linear layer, weight [K,C]:
//
//                     out      a              b
//   forward           out      x [N,C]        weight [K,C]
//   gradient of x     dx       dout [N,K]     weight, transposed [C,K]
//   and of weight     dweight  dout, tr. [K,N]  x, transposed [C,N]
//
// reference: plain loops.
// cpu:       operands become floats, then our own packed product (core/cpu_gemm.h).
// naive:     one thread per element of the result.
// tiled:     a block keeps its part of the result in registers (scaled_tiled.hip; tiled.h explains how a GEMM is tiled).
// library:   the vendor's, where the build found it (hipBLASLt, cuBLASLt).
//
// Measured in training: docs/fp8.md.
#include "core/cpu_gemm.h"
#include "core/device.h"
#include "core/library_gemm.h"
#include "core/operation.h"
#include "ops/matmul/matmul.h"
#include "ops/operations.h"

namespace llamac {
namespace {

// The scale of row i: an operand has one scale, or one per row.
template <class A>
A scale_of(View<const A, 1> scale, int64_t i) {
    return scale(scale.shape[0] == 1 ? 0 : i);
}

template <class T, class P, class Q>
void scaled_matmul_reference(View<T, 2> out, View<const P, 2> a, View<const Q, 2> b,
                             View<const arithmetic<T>, 1> a_scale, View<const arithmetic<T>, 1> b_scale,
                             View<const T, 2> residual, bool accumulate, int64_t) {
    using A = arithmetic<T>;
    for (int64_t n = 0; n < out.shape[0]; n++)
        for (int64_t k = 0; k < out.shape[1]; k++) {
            double sum = 0;
            for (int64_t c = 0; c < a.shape[1]; c++) sum += double(A(a(n, c)) * A(b(k, c)));
            const A product = A(sum * double(scale_of(a_scale, n)) * double(scale_of(b_scale, k)));
            out(n, k) =
                T(product + (residual ? A(residual(n, k)) : A(0)) + (accumulate ? A(out(n, k)) : A(0)));
        }
}

template <class P>
const float* as_floats(View<const P, 2> x, Scratch& scratch) {
    const int64_t count = x.shape[0] * x.shape[1];
    float* const values = scratch.reserve<float>(count);
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++) values[i] = float(x.data[i]);
    return values;
}

template <class T, class P, class Q>
void scaled_matmul_cpu(View<T, 2> out, View<const P, 2> a, View<const Q, 2> b, View<const float, 1> a_scale,
                       View<const float, 1> b_scale, View<const T, 2> residual, bool accumulate, int64_t) {
    const int64_t N = out.shape[0], K = out.shape[1], C = a.shape[1];
    static thread_local Scratch scratch_a, scratch_b, scratch_sums;
    const Matrix<float> left{as_floats(a, scratch_a), C, 1}, right{as_floats(b, scratch_b), C, 1};
    float* const sums = scratch_sums.reserve<float>(N * K);
    gemm<float>(N, K, C, left, right.transposed(), static_cast<const float*>(nullptr), sums);
#pragma omp parallel for
    for (int64_t i = 0; i < N * K; i++) {
        const float added = residual ? float(residual.data[i]) : 0.0f,
                    before = accumulate ? float(out.data[i]) : 0.0f;
        out.data[i] = T(scaled(sums[i], scale_of(a_scale, i / K), scale_of(b_scale, i % K)) + added + before);
    }
}

// ---- naive

// a_step, b_step: from the scale of a row to the next: 0 or 1.
template <class T, class P, class Q>
__global__ void scaled_matmul_naive_kernel(T* out, const P* a, const Q* b, const float* a_scale,
                                           const float* b_scale, const T* residual, int64_t N, int64_t K,
                                           int64_t C, int64_t a_step, int64_t b_step, bool accumulate) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, n = i / K, k = i % K;
    if (n >= N) return;
    double sum = 0;
    for (int64_t c = 0; c < C; c++) sum += double(float(a[n * C + c]) * float(b[k * C + c]));
    const float product = scaled(static_cast<float>(sum), a_scale[n * a_step], b_scale[k * b_step]);
    out[i] = T(product + (residual ? float(residual[i]) : 0.0f) + (accumulate ? float(out[i]) : 0.0f));
}

template <class T, class P, class Q>
void scaled_matmul_naive(View<T, 2> out, View<const P, 2> a, View<const Q, 2> b, View<const float, 1> a_scale,
                         View<const float, 1> b_scale, View<const T, 2> residual, bool accumulate, int64_t,
                         LaunchContext context) {
    const int64_t N = out.shape[0], K = out.shape[1], C = a.shape[1];
    launch(context.grid(N * K), scaled_matmul_naive_kernel<T, P, Q>, out.data, a.data, b.data, a_scale.data,
           b_scale.data, residual.data, N, K, C, a_scale.shape[0] > 1, b_scale.shape[0] > 1, accumulate);
}

// ---- library: the vendor's

#if defined(LLAMAC_BLASLT)
// scales: of b, whose rows are 16 or more.
template <class A>
Gemm scaled_product(DType type, DType a_type, DType b_type, const A& a, int64_t columns, int64_t scales,
                    bool adds, bool fast) {
    const GemmScale scale = scales == 1 ? GemmScale::tensor : GemmScale::row;
    return {a.shape[0], columns, a.shape[1], false, true,  a_type, b_type,
            type,       type,    adds,       scale, scale, fast};
}

// The same product by our own kernels.
void own_product(const Gemm& g, const GemmOperands& o, hipStream_t stream) {
    static const KernelChoices own({"scaled_matmul=tiled,naive", "scaled_matmul_rows=tiled,naive"});
    Context context = {Backend::device, stream};
    context.kernels = &own;
    const auto tensor = [](const void* data, DType type, auto... shape) {
        return data ? make_tensor(const_cast<void*>(data), type, {shape...}) : Tensor{};
    };
    const bool by_row = g.a_scale == GemmScale::row, accumulate = o.c == o.out;
    const Tensor out = tensor(o.out, g.out, g.rows, g.columns), a = tensor(o.a, g.a, g.rows, g.inner),
                 b = tensor(o.b, g.b, g.columns, g.inner),
                 a_scale = tensor(o.a_scale, DType::f32, by_row ? g.rows : 1),
                 b_scale = tensor(o.b_scale, DType::f32, by_row ? g.columns : 1),
                 residual = accumulate ? Tensor{} : tensor(o.c, g.c, g.rows, g.columns);
    if (by_row)
        return scaled_matmul_rows(context, {.out = out,
                                            .a = a,
                                            .b = b,
                                            .a_scale = a_scale,
                                            .b_scale = b_scale,
                                            .residual = residual,
                                            .accumulate = accumulate,
                                            .fast_accum = int64_t{g.fast_accumulation}});
    scaled_matmul(context, {.out = out,
                            .a = a,
                            .b = b,
                            .a_scale = a_scale,
                            .b_scale = b_scale,
                            .residual = residual,
                            .accumulate = accumulate,
                            .fast_accum = int64_t{g.fast_accumulation}});
}

template <class T, class P, class Q>
void scaled_matmul_library(View<T, 2> out, View<const P, 2> a, View<const Q, 2> b,
                           View<const float, 1> a_scale, View<const float, 1> b_scale,
                           View<const T, 2> residual, bool accumulate, int64_t fast, LaunchContext context) {
    const void* const added = accumulate ? out.data : residual.data;
    run_gemm(scaled_product(dtype_of<T>(), dtype_of<P>(), dtype_of<Q>(), a, b.shape[0], b_scale.shape[0],
                            added != nullptr, fast != 0),
             {out.data, a.data, b.data, added, a_scale.data, b_scale.data}, own_product, context.workspace,
             context.caller.gemms, context.stream);
}

bool library_supports(const Call& c) {
    const Tensor &out = c.operand("out"), &a = c.operand("a"), &b = c.operand("b"),
                 &residual = c.operand("residual");
    const bool accumulates = c.number("accumulate") != 0, fast = c.number("fast_accum") != 0;
    uintptr_t bits = 0;
    for (const Tensor* t : {&out, &a, &b, &residual, &c.operand("a_scale"), &c.operand("b_scale")})
        bits |= reinterpret_cast<uintptr_t>(t->data);
    return bits % gemm_alignment == 0 && c["C"] % 16 == 0 && c["K"] % 16 == 0 &&
           !(residual.data && accumulates) &&
           gemm_supports(scaled_product(out.dtype, a.dtype, b.dtype, a, b.shape[0],
                                        c.operand("b_scale").shape[0], residual.data || accumulates, fast),
                         c.launch.stream);
}
#endif

std::vector<Variant> variants() {
    return {
        {"cpu", "packed product of floats",
         instantiations<LLAMAC_PAIRS(scaled_matmul_cpu, float), LLAMAC_PAIRS(scaled_matmul_cpu, bf16)>()},
#if defined(LLAMAC_BLASLT)
        {.name = "library",
         .idea = "the vendor's library (hipBLASLt, cuBLASLt), the fastest of its candidates",
         .instantiations = instantiations<LLAMAC_PAIRS(scaled_matmul_library, float),
                                          LLAMAC_PAIRS(scaled_matmul_library, bf16)>(),
         .supports = {"a product that the library takes, C and K multiples of 16, operands aligned to 16 "
                      "bytes, residual or "
                      "accumulate alone",
                      library_supports},
         .workspace = [](const Call&) { return int64_t{gemm_workspace_bytes}; }},
#endif
        tiled_scaled_matmul(),
        {"naive", "one thread per element",
         instantiations<LLAMAC_PAIRS(scaled_matmul_naive, float), LLAMAC_PAIRS(scaled_matmul_naive, bf16)>()},
        {"reference", "plain loops",
         instantiations<LLAMAC_PAIRS(scaled_matmul_reference, float),
                        LLAMAC_PAIRS(scaled_matmul_reference, bf16),
                        scaled_matmul_reference<double, double, double>>()}};
}

double product_flops(const Call& c) {
    return 2.0 * static_cast<double>(c["N"] * c["C"]) * static_cast<double>(c["K"]);
}

Operation scaled_matmul(
    "scaled_matmul<T: f32 bf16 f64, A: arithmetic(T), P: e4m3 e5m2 e4m3fnuz e5m2fnuz f64,"
    " Q: e4m3 e4m3fnuz f64>"
    "(out: T[N,K] adds_if(accumulate); a: P[N,C], b: Q[K,C], a_scale: A[1] >0, b_scale: A[1] >0, residual?: "
    "T[N,K];"
    " accumulate: bool, fast_accum: int {0, 1}) rows(N)"
    " test(N=128, C=96, K=256) test(N=208, C=336, K=144)"
    " test_large(N=1000, C=1040, K=528)",
    "out = a * transposed b in fp8, times both scales (+ residual)", variants(), product_flops);

Operation scaled_matmul_rows(
    "scaled_matmul_rows<T: f32 bf16 f64, A: arithmetic(T), P: e4m3 e5m2 e4m3fnuz e5m2fnuz f64,"
    " Q: e4m3 e4m3fnuz f64>"
    "(out: T[N,K] adds_if(accumulate); a: P[N,C], b: Q[K,C], a_scale: A[N] >0, b_scale: A[K] >0, residual?: "
    "T[N,K];"
    " accumulate: bool, fast_accum: int {0, 1}) rows(N)"
    " test(N=128, C=96, K=256) test(N=208, C=336, K=144)",
    "out = a * transposed b in fp8, times the scales of both rows (+ residual)", variants(), product_flops);

}  // namespace
}  // namespace llamac
