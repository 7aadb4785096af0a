// Initial weights: normal numbers (core/random.h).
//
//   out[p] = deviation * n(seed, stream, offset + p)
//
// n: the standard normal number of an element of a stream, by Box and Muller from Philox's bits. out is a part of a parameter:
// ranks that share one draw their own parts of the same numbers. The product is rounded to f32, then to T. All variants and
// devices have the same bits.
//
// A pair of numbers takes half a call of Philox and about 100 operations in double: a GPU draws at its rate of double
// arithmetic, not of memory.
//
// reference:  one element after another.
// cpu:        blocks of four elements over threads.
// naive:      one thread per element, which drops the other one of its pair.
// vectorized: two blocks of four elements per thread, 128-bit stores.
#include <algorithm>

#include "core/device.h"
#include "core/operation.h"
#include "core/random.h"

namespace llamac {
namespace {

// Elements 4*block .. 4*block+3.
__host__ __device__ inline void draw_block(float deviation, int64_t seed, int64_t stream, int64_t block,
                                           float* values) {
    const Philox p = random_block(static_cast<uint64_t>(seed), 0, static_cast<uint32_t>(stream), block);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const NormalPair pair = normal_pair(p.bits[i], p.bits[i + 1]);
        values[i] = deviation * pair.even, values[i + 1] = deviation * pair.odd;
    }
}
__host__ __device__ inline float draw(float deviation, int64_t seed, int64_t stream, int64_t element) {
    return deviation * random_normal(static_cast<uint64_t>(seed), 0, static_cast<uint32_t>(stream), element);
}

template <class T>
void fill_normal_reference(View<T, 1> out, float deviation, int64_t seed, int64_t stream, int64_t offset) {
    for (int64_t p = 0; p < out.shape[0]; p++) out(p) = T(draw(deviation, seed, stream, offset + p));
}

template <class T>
void fill_normal_cpu(View<T, 1> out, float deviation, int64_t seed, int64_t stream, int64_t offset) {
    const int64_t end = offset + out.shape[0];
#pragma omp parallel for
    for (int64_t block = offset / 4; block < (end + 3) / 4; block++) {
        float values[4];
        draw_block(deviation, seed, stream, block, values);
        for (int64_t i = std::max(offset, 4 * block); i < std::min(end, 4 * block + 4); i++)
            out.data[i - offset] = T(values[i % 4]);
    }
}

// ---- naive

template <class T>
__global__ void fill_normal_naive_kernel(T* out, int64_t P, float deviation, int64_t seed, int64_t stream,
                                         int64_t offset) {
    const int64_t p = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (p < P) out[p] = T(draw(deviation, seed, stream, offset + p));
}

template <class T>
void fill_normal_naive(View<T, 1> out, float deviation, int64_t seed, int64_t stream, int64_t offset,
                       LaunchContext context) {
    const int64_t P = out.shape[0];
    launch(context.grid(P), fill_normal_naive_kernel<T>, out.data, P, deviation, seed, stream, offset);
}

// ---- vectorized: whole blocks of Philox, 128-bit stores

constexpr int block_threads = 256;
constexpr int elements_per_thread = vector_size<bf16>;

template <class T, bool whole>
__global__ void __launch_bounds__(block_threads)
    fill_normal_vectorized_kernel(T* out, int64_t P, float deviation, int64_t seed, int64_t stream,
                                  int64_t offset) {
    const int64_t p = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * elements_per_thread;
    if (p >= P) return;
    float values[elements_per_thread];
#pragma unroll
    for (int i = 0; i < elements_per_thread; i += 4)
        draw_block(deviation, seed, stream, (offset + p + i) / 4, values + i);
#pragma unroll
    for (int begin = 0; begin < elements_per_thread; begin += vector_size<T>) {
        float part[vector_size<T>];
        for (int i = 0; i < vector_size<T>; i++) part[i] = values[begin + i];
        store_part<whole>(out, p + begin, P, pack<T>(part));
    }
}

template <class T>
void fill_normal_vectorized(View<T, 1> out, float deviation, int64_t seed, int64_t stream, int64_t offset,
                            LaunchContext context) {
    const int64_t P = out.shape[0];
    launch(
        Grid(blocks_for(P, int64_t{context.threads} * elements_per_thread), context.threads, context.stream),
        is_whole({out.data}, P, elements_per_thread) ? fill_normal_vectorized_kernel<T, true>
                                                     : fill_normal_vectorized_kernel<T, false>,
        out.data, P, deviation, seed, stream, offset);
}

bool begins_with_block(const Call& c) {
    return static_cast<int64_t>(c.number("offset")) % 4 == 0;
}

Operation fill_normal(
    "fill_normal<T: f32 bf16 fp16 f64>"
    "(out: T[P]; ; deviation: float {0.02, 1}, seed: int {42, 1e12}, stream: int {4},"
    " offset: int = 0 {0, 17179867136, 3}) empty(P) test(P=2056)",
    "out = normal numbers of a stream, from element `offset` on",
    {{"cpu", "blocks of four elements over threads", instantiations<LLAMAC_FLOATS(fill_normal_cpu)>()},
     {"vectorized", "eight elements per thread, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(fill_normal_vectorized)>(),
      Constraints{"an offset that is a multiple of 4", begins_with_block}, blocks_of(block_threads, 128)},
     {"naive", "one thread per element", instantiations<LLAMAC_KERNELS(fill_normal_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(fill_normal_reference), fill_normal_reference<double>>()}},
    [](const Call& c) { return 48.0 * c["P"]; });

}  // namespace
}  // namespace llamac
