// Scaled rows of a matrix, also of codes of fp8 (core/fp8.h) and into a sum.
//
//   out[k,c] (+)= scale * row_scale[k] * x[k,c], in fp32, rounded to nearest (even) where T is narrower
//
// Without row_scale, its values are 1. The rows of out and x may be parts of longer ones. Adapters (model/lora.h) are copied into
// block-diagonal matrices so; frozen weights in fp8 are dequantised, with row_scale the inverse of quantize_rows.
//
// reference:  plain loops.
// cpu:        rows over threads, vector lanes over columns.
// naive:      one thread per element.
// vectorized: 16 elements per thread, 128-bit accesses.
#include "core/device.h"
#include "core/operation.h"
#include "core/simd.h"

namespace llamac {
namespace {

template <class T, class G>
void scale_rows_reference(View<T, 2> out, View<const G, 2> x, View<const arithmetic<T>, 1> row_scale,
                          double scale, bool accumulate) {
    using A = arithmetic<T>;
    for (int64_t k = 0; k < x.shape[0]; k++)
        for (int64_t c = 0; c < x.shape[1]; c++) {
            const A value = A(scale) * (row_scale ? row_scale(k) : A(1)) * A(x(k, c));
            out(k, c) = T(accumulate ? A(out(k, c)) + value : value);
        }
}

template <class T, class G>
void scale_rows_cpu(View<T, 2> out, View<const G, 2> x, View<const float, 1> row_scale, double scale,
                    bool accumulate) {
    const int64_t K = x.shape[0], C = x.shape[1];
#pragma omp parallel for
    for (int64_t k = 0; k < K; k++) {
        T* const to = &out(k, 0);
        const G* const from = &x(k, 0);
        const float factor = static_cast<float>(scale) * (row_scale ? row_scale(k) : 1.0f);
#pragma omp simd
        for (int64_t c = 0; c < C; c++) {
            const float value = factor * float(from[c]);
            store(to + c, accumulate ? float(to[c]) + value : value);
        }
    }
}

// ---- naive

template <class T, class G>
__global__ void scale_rows_naive_kernel(View<T, 2> out, View<const G, 2> x, View<const float, 1> row_scale,
                                        float scale, bool accumulate) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, C = x.shape[1], k = i / C, c = i % C;
    if (k >= x.shape[0]) return;
    const float value = scale * (row_scale ? row_scale(k) : 1.0f) * float(x(k, c));
    out(k, c) = T(accumulate ? float(out(k, c)) + value : value);
}

template <class T, class G>
void scale_rows_naive(View<T, 2> out, View<const G, 2> x, View<const float, 1> row_scale, double scale,
                      bool accumulate, LaunchContext context) {
    launch(context.grid(x.shape[0] * x.shape[1]), scale_rows_naive_kernel<T, G>, out, x, row_scale,
           static_cast<float>(scale), accumulate);
}

// ---- vectorized: 128-bit accesses

constexpr int block_threads = 512;
constexpr int64_t elements_per_thread = 16;

// Elements c .. c+16 of a row of C, zeros beyond C. whole: by 128-bit accesses.
template <bool whole, class G>
__device__ void load_elements(const G* row, int64_t c, int64_t C, float (&x)[elements_per_thread]) {
    if constexpr (sizeof(G) > 1) {
#pragma unroll
        for (int begin = 0; begin < elements_per_thread; begin += vector_size<G>) {
            float part[vector_size<G>];
            unpack(load_part<whole>(row, c + begin, C), part);
            for (int i = 0; i < vector_size<G>; i++) x[begin + i] = part[i];
        }
    } else {
        union {
            uint4 bits;
            G codes[elements_per_thread];
        } of = {};
        if (whole)
            of.bits = load128(row + c);
        else
            for (int i = 0; i < elements_per_thread; i++)
                if (c + i < C) of.codes[i] = row[c + i];
#pragma unroll
        for (int i = 0; i < elements_per_thread; i++) x[i] = float(of.codes[i]);
    }
}

template <class T, class G, bool whole>
__global__ void __launch_bounds__(block_threads)
    scale_rows_vectorized_kernel(Dependent<T*> out_, Dependent<const G*> x_,
                                 Dependent<const float*> row_scale_, int64_t K, int64_t C, int64_t out_stride,
                                 int64_t x_stride, unsigned across, float scale, bool accumulate) {
    const auto [out, x, row_scale] = wait(out_, x_, row_scale_);
    const int64_t place = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, k = place / across,
                  first = place % across * elements_per_thread;
    if (k >= K) return;
    const float factor = row_scale ? scale * row_scale[k] : scale;
    float values[elements_per_thread];
    load_elements<whole>(x + k * x_stride, first, C, values);
    T* const row = out + k * out_stride;
#pragma unroll
    for (int begin = 0; begin < elements_per_thread; begin += vector_size<T>) {
        float part[vector_size<T>] = {};
        if (accumulate) unpack(load_part<whole>(row, first + begin, C), part);
        for (int i = 0; i < vector_size<T>; i++)
            part[i] = accumulate ? part[i] + factor * values[begin + i] : factor * values[begin + i];
        store_part<whole>(row, first + begin, C, pack(part));
    }
}

template <class T, class G>
void scale_rows_vectorized(View<T, 2> out, View<const G, 2> x, View<const float, 1> row_scale, double scale,
                           bool accumulate, LaunchContext context) {
    const int64_t K = x.shape[0], C = x.shape[1];
    const bool whole = is_whole({out.data, x.data}, C | out.stride[0] | x.stride[0], elements_per_thread);
    const unsigned across = blocks_for(C, elements_per_thread);
    launch(context.grid(K * across),
           whole ? scale_rows_vectorized_kernel<T, G, true> : scale_rows_vectorized_kernel<T, G, false>,
           out.data, x.data, row_scale.data, K, C, out.stride[0], x.stride[0], across,
           static_cast<float>(scale), accumulate);
}

constexpr Constraints few_vectors{
    "fewer than 2^31 vectors of 16 elements",
    [](const Call& c) { return c["K"] < (int64_t{1} << 31) / blocks_for(c["C"], elements_per_thread); }};

#define LLAMAC_SCALED(LAUNCHER) \
    LAUNCHER<float, float>, LAUNCHER<bf16, bf16>, LAUNCHER<float, e4m3>, LAUNCHER<bf16, e4m3>

Operation scale_rows(
    "scale_rows<T: f32 bf16 f64, G: f32 bf16 e4m3 f64, A: arithmetic(T)>"
    "(out: T[K,C] strided adds_if(accumulate); x: G[K,C] strided, row_scale?: A[K];"
    " scale: float {1, 0.5}, accumulate: bool) empty(K) test(K=16, C=4096) test(K=33, C=1040)",
    "out += scale * row_scale * x of another type",
    {{"cpu", "rows over threads, vector lanes over columns", instantiations<LLAMAC_SCALED(scale_rows_cpu)>()},
     {"vectorized", "16 elements per thread, 128-bit accesses",
      instantiations<LLAMAC_SCALED(scale_rows_vectorized)>(), few_vectors,
      blocks_of(256, 128, block_threads)},
     {"naive", "one thread per element", instantiations<LLAMAC_SCALED(scale_rows_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_SCALED(scale_rows_reference), scale_rows_reference<double, double>>()}},
    [](const Call&) { return 0.0; });  // it moves memory; codes are no operands of a product

}  // namespace
}  // namespace llamac
