// The square of the L2 norm of all gradients as one vector, for clipping (Pascanu et al., 2013), in double:
//
//   squares = sum_p x[p]^2
//
// Sums of several types of gradients, or of several ranks, are added. adamw takes the root.
//
// reference:  one sum in double: a serial float sum over millions of terms would stall.
// cpu:        chunks of fixed size over threads, each summed by block_sum, then the chunks in order: the number of threads does
//             not change the bits.
// naive:      one block adds everything.
// vectorized: a chunk of 128 KB and one partial sum per block, four 128-bit loads per thread in flight; a second kernel, of one
//             block, adds the partial sums in double. (A grid that stays resident, each load a grid's width from the last, is
//             3% slower.)
//
// Measured: docs/benchmarks/nvidia-h200.md.
#include <algorithm>

#include "core/device.h"
#include "core/operation.h"
#include "core/simd.h"

namespace llamac {
namespace {

template <class T>
void global_norm_reference(View<double, 1> squares, View<const T, 1> x, bool accumulate) {
    double sum = accumulate ? squares(0) : 0.0;
    for (int64_t p = 0; p < x.shape[0]; p++) sum += double(x(p)) * double(x(p));
    squares(0) = sum;
}

template <class T>
void global_norm_cpu(View<double, 1> squares, View<const T, 1> x, bool accumulate) {
    constexpr int64_t chunk = 16384;
    const int64_t P = x.shape[0], chunks = (P + chunk - 1) / chunk;
    std::vector<double> partial(chunks);
#pragma omp parallel for
    for (int64_t k = 0; k < chunks; k++) {
        const T* begin = x.data + k * chunk;
        partial[k] = block_sum(std::min(chunk, P - k * chunk),
                               [begin](int64_t i) { return float(begin[i]) * float(begin[i]); });
    }
    double sum = accumulate ? squares(0) : 0.0;
    for (const double s : partial) sum += s;
    squares(0) = sum;
}

// ---- naive

template <class T>
__global__ void __launch_bounds__(max_threads_per_block)
    global_norm_naive_kernel(double* squares, const T* x, int64_t P, bool accumulate) {
    struct Shared {
        double sums[max_threads_per_block];
    };
    Shared& shared = shared_memory<Shared>();
    double sum = 0;
    for (int64_t p = threadIdx.x; p < P; p += blockDim.x) sum += double(float(x[p])) * double(float(x[p]));
    shared.sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (unsigned t = 1; t < blockDim.x; t++) sum += shared.sums[t];
    *squares = accumulate ? *squares + sum : sum;
}

template <class T>
void global_norm_naive(View<double, 1> squares, View<const T, 1> x, bool accumulate, LaunchContext context) {
    launch(Grid(1, context.threads, context.stream), global_norm_naive_kernel<T>, squares.data, x.data,
           x.shape[0], accumulate);
}

// ---- vectorized: one partial sum per block

constexpr int loads_per_thread = 4, block_threads = 1024;
// Vectors a block, one after another: few enough that blocks that end early get more of them, and the same on
// every device, so that the bits are, too.
constexpr int64_t chunk_vectors = 8192;

template <class T, bool whole>
__global__ void __launch_bounds__(block_threads)
    global_norm_vectorized_kernel(Dependent<float*> partial_, Dependent<const T*> x_, int64_t P) {
    const auto [partial, x] = wait(partial_, x_);
    constexpr int size = vector_size<T>;
    struct Shared {
        float warps[max_warps];
    };
    const auto load = [=](int64_t v) {
        if constexpr (whole)
            return load128_streaming(x + v * size);
        else
            return load_part<false>(x, v * size, P);
    };
    float sum[size] = {};
    const auto add = [&sum](uint4 bits) {
        float a[size];
        unpack<T>(bits, a);
        for (int i = 0; i < size; i++) sum[i] += a[i] * a[i];
    };
    const int64_t vectors = whole ? P / size : (P + size - 1) / size, begin = blockIdx.x * chunk_vectors;
    const int64_t end = begin + chunk_vectors < vectors ? begin + chunk_vectors : vectors, step = blockDim.x;
    int64_t v = begin + threadIdx.x;
    for (; v + (loads_per_thread - 1) * step < end; v += loads_per_thread * step) {
        uint4 bits[loads_per_thread];
#pragma unroll
        for (int k = 0; k < loads_per_thread; k++) bits[k] = load(v + k * step);
#pragma unroll
        for (int k = 0; k < loads_per_thread; k++) add(bits[k]);
    }
    for (; v < end; v += step) add(load(v));
    if (whole && blockIdx.x == 0 && vectors * size + threadIdx.x < P) {
        const float last = float(x[vectors * size + threadIdx.x]);
        sum[0] += last * last;
    }
    float all = 0;
    for (int i = 0; i < size; i++) all += sum[i];
    all = block_sum(all, shared_memory<Shared>().warps);
    if (threadIdx.x == 0) partial[blockIdx.x] = all;
}

// One block.
__global__ void __launch_bounds__(block_threads)
    global_norm_vectorized_kernel_finish(Dependent<double*> squares_, Dependent<const float*> partial_,
                                         int count, bool accumulate) {
    const auto [squares, partial] = wait(squares_, partial_);
    struct Shared {
        double warps[max_warps];
    };
    Shared& shared = shared_memory<Shared>();
    double sum = 0;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
        sum += double(partial[i]);
    for (int distance = warp_size / 2; distance > 0; distance /= 2) sum += __shfl_xor(sum, distance);
    if (lane_index() == 0) shared.warps[warp_index()] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    sum = accumulate ? *squares : 0.0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / warp_size; w++) sum += shared.warps[w];
    *squares = sum;
}

int norm_blocks(int64_t P, int size) {
    return static_cast<int>(blocks_for(P, size * chunk_vectors));
}
int64_t norm_workspace(const Call& c) {
    return 4 * norm_blocks(c["P"], static_cast<int>(16 / size_of(c.operand("x").dtype)));
}

template <class T>
void global_norm_vectorized(View<double, 1> squares, View<const T, 1> x, bool accumulate,
                            LaunchContext context) {
    float* partial = static_cast<float*>(context.workspace);
    const int64_t P = x.shape[0];
    const int blocks = norm_blocks(P, vector_size<T>);
    const bool whole = is_whole({x.data}, 0, vector_size<T>);
    launch(Grid(blocks, context.threads, context.stream),
           whole ? global_norm_vectorized_kernel<T, true> : global_norm_vectorized_kernel<T, false>, partial,
           x.data, P);
    launch(Grid(1, block_threads, context.stream), global_norm_vectorized_kernel_finish, squares.data,
           partial, blocks, accumulate);
}

Operation global_norm(
    "global_norm<T: f32 bf16 fp16 f64>"
    "(squares: f64[1] adds_if(accumulate); x: T[P]; accumulate: bool) empty(P)",
    "squares = sum of x^2, the square of the norm",
    {{"cpu", "fixed chunks over threads", instantiations<LLAMAC_FLOATS(global_norm_cpu)>()},
     {"vectorized", "one partial sum per block, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(global_norm_vectorized)>(), nullptr, blocks_of(512, 256, 1024),
      norm_workspace},
     {"naive", "one block", instantiations<LLAMAC_KERNELS(global_norm_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(global_norm_reference), global_norm_reference<double>>()}},
    [](const Call& c) { return 2.0 * c["P"]; });

}  // namespace
}  // namespace llamac
