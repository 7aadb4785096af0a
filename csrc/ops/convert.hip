// Conversion between storage types, also into a sum.
//
//   out[p] (+)= x[p], in fp32, rounded to nearest (even) where T is narrower
//
// Ranks that exchange gradients in another type convert them, and add the sums of micro-batches. Ranks that share weights round
// the master weights before each gather, to the bits that AdamW writes: without accumulate, -0 stays -0.
//
// reference:  plain loops.
// cpu:        threads and vector lanes.
// naive:      one thread per element.
// vectorized: eight elements per thread: one 128-bit access of a narrow type, two of a wide one.
#include "core/device.h"
#include "core/operation.h"
#include "core/simd.h"

namespace llamac {
namespace {

template <class T, class G>
void convert_reference(View<T, 1> out, View<const G, 1> x, bool accumulate) {
    for (int64_t p = 0; p < x.shape[0]; p++) {
        using A = arithmetic<T>;
        out(p) = T(accumulate ? A(A(out(p)) + A(x(p))) : A(x(p)));
    }
}

template <class T, class G>
void convert_cpu(View<T, 1> out, View<const G, 1> x, bool accumulate) {
    const int64_t P = x.shape[0];
    T* const to = out.data;
    const G* const from = x.data;
#pragma omp parallel for simd
    for (int64_t p = 0; p < P; p++)
        store(to + p, accumulate ? float(to[p]) + float(from[p]) : float(from[p]));
}

// ---- naive

template <class T, class G>
__global__ void convert_naive_kernel(T* out, const G* x, int64_t P, bool accumulate) {
    const int64_t p = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (p < P) out[p] = T(accumulate ? float(out[p]) + float(x[p]) : float(x[p]));
}

template <class T, class G>
void convert_naive(View<T, 1> out, View<const G, 1> x, bool accumulate, LaunchContext context) {
    const int64_t P = x.shape[0];
    launch(context.grid(P), convert_naive_kernel<T, G>, out.data, x.data, P, accumulate);
}

// ---- vectorized: 128-bit accesses

constexpr int block_threads = 512;
constexpr int elements_per_thread = vector_size<bf16>;

template <class T, class G, bool whole>
__global__ void __launch_bounds__(block_threads)
    convert_vectorized_kernel(Dependent<T*> out_, Dependent<const G*> x_, int64_t P, bool accumulate) {
    const auto [out, x] = wait(out_, x_);
    const int64_t p = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * elements_per_thread;
    if (p >= P) return;
    float values[elements_per_thread];
#pragma unroll
    for (int begin = 0; begin < elements_per_thread; begin += vector_size<G>) {
        float part[vector_size<G>];
        unpack<G>(load_part<whole>(x, p + begin, P), part);
        for (int i = 0; i < vector_size<G>; i++) values[begin + i] = part[i];
    }
#pragma unroll
    for (int begin = 0; begin < elements_per_thread; begin += vector_size<T>) {
        float part[vector_size<T>] = {};
        if (accumulate) unpack<T>(load_part<whole>(out, p + begin, P), part);
        for (int i = 0; i < vector_size<T>; i++)
            part[i] = accumulate ? part[i] + values[begin + i] : values[begin + i];
        store_part<whole>(out, p + begin, P, pack<T>(part));
    }
}

template <class T, class G>
void convert_vectorized(View<T, 1> out, View<const G, 1> x, bool accumulate, LaunchContext context) {
    const int64_t P = x.shape[0];
    const bool whole = is_whole({out.data, x.data}, P, elements_per_thread);
    launch(
        Grid(blocks_for(P, int64_t{context.threads} * elements_per_thread), context.threads, context.stream),
        whole ? convert_vectorized_kernel<T, G, true> : convert_vectorized_kernel<T, G, false>, out.data,
        x.data, P, accumulate);
}

Operation convert(
    "convert<T: f32 bf16 fp16 f64, G: f32 bf16 fp16 f64>"
    "(out: T[P] adds_if(accumulate); x: G[P]; accumulate: bool) empty(P)",
    "out += x of another type",
    {{"cpu", "threads and vector lanes",
      instantiations<LLAMAC_FLOATS(convert_cpu, float), LLAMAC_FLOATS(convert_cpu, bf16),
                     convert_cpu<float, fp16>>()},
     {"vectorized", "eight elements per thread, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(convert_vectorized, float), LLAMAC_KERNELS(convert_vectorized, bf16),
                     convert_vectorized<float, fp16>>(),
      nullptr, blocks_of(256, 128, block_threads)},
     {"naive", "one thread per element",
      instantiations<LLAMAC_KERNELS(convert_naive, float), LLAMAC_KERNELS(convert_naive, bf16),
                     convert_naive<float, fp16>>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(convert_reference, float), LLAMAC_FLOATS(convert_reference, bf16),
                     convert_reference<float, fp16>, convert_reference<double, double>>()}},
    [](const Call& c) { return 1.0 * c["P"]; });

}  // namespace
}  // namespace llamac
