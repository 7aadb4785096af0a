// The column of each row's largest element, the first of equals. NaN counts as -infinity.
//
//   out[n] = the least v with x[n,v] = max_u x[n,u]
//
// reference:  plain loops.
// cpu:        rows over threads; vector lanes find the largest of a run of columns, then its place.
// naive:      one thread per row.
// vectorized: one block per row, 128-bit accesses, several of them in flight.
//
// Measured: docs/benchmarks/nvidia-h200.md.
#include <algorithm>
#include <limits>

#include "core/device.h"
#include "core/operation.h"

namespace llamac {
namespace {

template <class T>
void argmax_reference(View<int32_t, 1> out, View<const T, 2> x) {
    using A = arithmetic<T>;
    for (int64_t n = 0; n < x.shape[0]; n++) {
        A largest = -std::numeric_limits<A>::infinity();
        out(n) = 0;
        for (int64_t v = 0; v < x.shape[1]; v++) {
            if (!(A(x(n, v)) > largest)) continue;
            largest = A(x(n, v));
            out(n) = static_cast<int32_t>(v);
        }
    }
}

template <class T>
int32_t first_largest(const T* x, int64_t V) {
    constexpr int64_t run = 1024;
    float largest = -std::numeric_limits<float>::infinity();
    int64_t best = 0;
    for (int64_t begin = 0; begin < V; begin += run) {
        const int64_t end = std::min(V, begin + run);
        float of_run = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : of_run)
        for (int64_t v = begin; v < end; v++) of_run = float(x[v]) > of_run ? float(x[v]) : of_run;
        if (!(of_run > largest)) continue;
        largest = of_run;
        best = begin;
        while (float(x[best]) != largest) best++;
    }
    return static_cast<int32_t>(best);
}

template <class T>
void argmax_cpu(View<int32_t, 1> out, View<const T, 2> x) {
#pragma omp parallel for if (x.shape[0] > 1)
    for (int64_t n = 0; n < x.shape[0]; n++) out(n) = first_largest(&x(n, 0), x.shape[1]);
}

// ---- naive

template <class T>
__global__ void argmax_naive_kernel(int32_t* out, View<const T, 2> x, int64_t N, int64_t V) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (n >= N) return;
    float largest = -INFINITY;
    int best = 0;
    for (int64_t v = 0; v < V; v++)
        if (float(x(n, v)) > largest) {
            largest = float(x(n, v));
            best = static_cast<int>(v);
        }
    out[n] = best;
}

template <class T>
void argmax_naive(View<int32_t, 1> out, View<const T, 2> x, LaunchContext context) {
    launch(context.grid(x.shape[0]), argmax_naive_kernel<T>, out.data, x, x.shape[0], x.shape[1]);
}

// ---- vectorized: one block per row

constexpr int block_threads = 1024;
// One where accesses are narrow: there more addresses than registers would be in flight.
template <bool whole>
constexpr int loads_per_thread = whole ? 4 : 1;

struct Largest {
    float value = -INFINITY;
    int at = 0;

    __device__ void add(float other, int place) {
        if (other > value || (other == value && place < at)) value = other, at = place;
    }
};

template <class T, bool whole>
__global__ void __launch_bounds__(block_threads)
    argmax_vectorized_kernel(Dependent<int32_t*> out_, Dependent<const T*> x_, int64_t V, int64_t stride) {
    const auto [out, x] = start_next_and_wait(out_, x_);
    constexpr int size = vector_size<T>, loads = loads_per_thread<whole>;
    struct Shared {
        float values[max_warps];
        int places[max_warps];
    };
    Shared& shared = shared_memory<Shared>();
    const T* row = x + blockIdx.x * stride;
    const int64_t step = int64_t{blockDim.x} * size;
    Largest own;
    for (int64_t begin = int64_t{threadIdx.x} * size; begin < V; begin += loads * step) {
        uint4 bits[loads];
#pragma unroll
        for (int k = 0; k < loads; k++) bits[k] = load_part<whole>(row, begin + k * step, V);
#pragma unroll
        for (int k = 0; k < loads; k++) {
            float values[size];
            unpack<T>(bits[k], values);
            for (int i = 0; i < size; i++) {
                const int64_t v = begin + k * step + i;
                // A thread's columns come in order.
                if (v < V && values[i] > own.value) own.value = values[i], own.at = static_cast<int>(v);
            }
        }
    }
    for (int distance = warp_size / 2; distance > 0; distance /= 2)
        own.add(__shfl_xor(own.value, distance), __shfl_xor(own.at, distance));
    if (lane_index() == 0) shared.values[warp_index()] = own.value, shared.places[warp_index()] = own.at;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < static_cast<int>(blockDim.x) / warp_size; w++)
        own.add(shared.values[w], shared.places[w]);
    out[blockIdx.x] = own.at;
}

template <class T>
void argmax_vectorized(View<int32_t, 1> out, View<const T, 2> x, LaunchContext context) {
    launch(Grid(blocks_for(x.shape[0], 1), context.threads, context.stream),
           is_whole({x.data}, x.shape[1], vector_size<T>) && x.stride[0] % vector_size<T> == 0
               ? argmax_vectorized_kernel<T, true>
               : argmax_vectorized_kernel<T, false>,
           out.data, x.data, x.shape[1], x.stride[0]);
}

constexpr Constraints places_fit{"V at most 2^30", [](const Call& c) { return c["V"] <= 1 << 30; }};

Operation argmax(
    "argmax<T: f32 bf16 fp16 f64>(out: i32[N]; x: T[N,V] strided) rows(N) empty(N)"
    " test(N=3, V=4096) test(N=2, V=5003) test(N=1, V=40000)",
    "the column of each row's largest element, the first of equals",
    {{"cpu", "rows over threads, runs of columns by vector lanes",
      instantiations<LLAMAC_FLOATS(argmax_cpu)>()},
     {"vectorized", "one block per row, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(argmax_vectorized)>(), places_fit, blocks_of(block_threads, 256, 512)},
     {"naive", "one thread per row", instantiations<LLAMAC_KERNELS(argmax_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(argmax_reference), argmax_reference<double>>()}});

}  // namespace
}  // namespace llamac
