// Scaled rows of a matrix, also of codes of fp8 (core/fp8.h) and into a sum.
//
//   out[k,c] (+)= scale * row_scale[k] * x[k,c], in fp32, rounded to nearest (even) where T is narrower
//
// Without row_scale, its values are 1. The rows of out and x may be parts of longer ones. Adapters (model/lora.h) are copied into
// block-diagonal matrices so; frozen weights in fp8 are dequantized, with row_scale the inverse of quantize_rows.
//
// reference:  plain loops.
// cpu:        rows over threads, vector lanes over columns.
// naive:      one thread per element.
// vectorized: 128-bit stores of neighboring threads side by side; a thread has four of them in flight.
#include <algorithm>
#include <bit>

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

// ---- vectorized: 128-bit stores

constexpr int block_threads = 512, vectors_per_thread = 4;

// Elements c .. c+size of a row of C, zeros beyond C. whole: in one access.
template <bool whole, class G, int size>
struct Vector {
    struct alignas(size * sizeof(G)) Elements {
        G x[size];
    } of;

    __device__ void load(const G* row, int64_t c, int64_t C) {
        if constexpr (whole) {
            of = {};
            if (c < C) of = *reinterpret_cast<const Elements*>(row + c);
        } else {
            for (int i = 0; i < size; i++) of.x[i] = c + i < C ? row[c + i] : G(0.0f);
        }
    }
};

// Threads (x: a row's vectors, y: rows). Blocks: chunks of a row, then rows. A thread's vectors lie blockDim.x apart.
template <class T, class G, bool whole>
__global__ void __launch_bounds__(block_threads)
    scale_rows_vectorized_kernel(Dependent<Rows<T>> out_, Dependent<Rows<const G>> x_,
                                 Dependent<const float*> row_scale_, int64_t K, int64_t C, unsigned chunks,
                                 float scale, bool accumulate) {
    const auto [out, x, row_scale] = wait(out_, x_, row_scale_);
    constexpr int size = vector_size<T>;
    const int64_t k = int64_t{blockIdx.x / chunks} * blockDim.y + threadIdx.y;
    if (k >= K) return;
    const unsigned first = blockIdx.x % chunks * blockDim.x * vectors_per_thread + threadIdx.x;
    const auto column = [=](int v) { return int64_t{first + v * blockDim.x} * size; };
    Vector<whole, G, size> loaded[vectors_per_thread];
    uint4 before[vectors_per_thread];
#pragma unroll
    for (int v = 0; v < vectors_per_thread; v++) {
        loaded[v].load(x.at(k), column(v), C);
        before[v] = accumulate ? load_part<whole>(out.at(k), column(v), C) : make_uint4(0, 0, 0, 0);
    }
    const float factor = row_scale ? scale * row_scale[k] : scale;
#pragma unroll
    for (int v = 0; v < vectors_per_thread; v++) {
        float sums[size];
        unpack<T>(before[v], sums);
        for (int i = 0; i < size; i++) {
            const float value = factor * float(loaded[v].of.x[i]);
            sums[i] = accumulate ? sums[i] + value : value;
        }
        store_part<whole>(out.at(k), column(v), C, pack<T>(sums));
    }
}

template <class T, class G>
void scale_rows_vectorized(View<T, 2> out, View<const G, 2> x, View<const float, 1> row_scale, double scale,
                           bool accumulate, LaunchContext context) {
    constexpr int size = vector_size<T>;
    const int64_t K = x.shape[0], C = x.shape[1];
    const bool whole = is_whole({out.data, x.data}, C | out.stride[0] | x.stride[0], size);
    const unsigned across = blocks_for(C, size), most = static_cast<unsigned>(context.threads);
    // No more of a row's vectors than there are, and a warp's side by side.
    const unsigned wanted = std::max(std::min(across, 32U), blocks_for(across, vectors_per_thread));
    const unsigned columns = std::min(std::bit_ceil(wanted), most);
    const unsigned chunks = blocks_for(across, int64_t{columns} * vectors_per_thread);
    launch(Grid(dim3(chunks * blocks_for(K, most / columns)), dim3(columns, most / columns), context.stream),
           whole ? scale_rows_vectorized_kernel<T, G, true> : scale_rows_vectorized_kernel<T, G, false>,
           rows(out), rows(x), row_scale.data, K, C, chunks, static_cast<float>(scale), accumulate);
}

constexpr Constraints few_vectors{"fewer than 2^31 vectors of 4 elements", [](const Call& c) {
                                      return c["K"] < (int64_t{1} << 31) / blocks_for(c["C"], 4);
                                  }};

#define LLAMAC_SCALED(LAUNCHER)                                                                \
    LAUNCHER<float, float>, LAUNCHER<bf16, bf16>, LAUNCHER<fp16, fp16>, LAUNCHER<float, e4m3>, \
        LAUNCHER<bf16, e4m3>, LAUNCHER<fp16, e4m3>

Operation scale_rows(
    "scale_rows<T: f32 bf16 fp16 f64, G: f32 bf16 fp16 e4m3 f64, A: arithmetic(T)>"
    "(out: T[K,C] strided adds_if(accumulate); x: G[K,C] strided, row_scale?: A[K];"
    " scale: float {1, 0.5}, accumulate: bool) empty(K) test(K=16, C=4096) test(K=33, C=1040)",
    "out += scale * row_scale * x of another type",
    {{"cpu", "rows over threads, vector lanes over columns", instantiations<LLAMAC_SCALED(scale_rows_cpu)>()},
     {"vectorized", "four vectors per thread, 128-bit stores",
      instantiations<LLAMAC_SCALED(scale_rows_vectorized)>(), few_vectors,
      blocks_of(128, 256, block_threads)},
     {"naive", "one thread per element", instantiations<LLAMAC_SCALED(scale_rows_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_SCALED(scale_rows_reference), scale_rows_reference<double, double>>()}},
    [](const Call&) { return 0.0; });  // it moves memory; codes are no operands of a product

}  // namespace
}  // namespace llamac
