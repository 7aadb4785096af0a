// The forward passes of RMSNorm with and without a residual, for rmsnorm.hip and residual_rmsnorm.hip, and how threads share
// rows and load them ahead, which layernorm.hip has in common with them. rmsnorm.hip has the mathematics and each variant's idea.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/device.h"
#include "core/operation.h"
#include "core/simd.h"

namespace llamac {

template <class T>
void rmsnorm_forward_reference(View<T, 2> out, View<arithmetic<T>, 1> rstd, View<const T, 2> x,
                               View<const T, 1> weight, double eps) {
    using A = arithmetic<T>;
    const int64_t N = x.shape[0], C = x.shape[1];
    for (int64_t n = 0; n < N; n++) {
        double sum = 0;
        for (int64_t c = 0; c < C; c++) sum += double(x(n, c)) * double(x(n, c));
        const A r = A(1 / std::sqrt(sum / double(C) + eps));
        for (int64_t c = 0; c < C; c++) out(n, c) = T(A(x(n, c)) * r * A(weight(c)));
        rstd(n) = r;
    }
}

template <class T>
float normalize_row(T* out, const T* x, const T* weight, int64_t C, double eps) {
    const double sum = block_sum(C, [x](int64_t c) { return float(x[c]) * float(x[c]); });
    const float r = static_cast<float>(1 / std::sqrt(sum / static_cast<double>(C) + eps));
#pragma omp simd
    for (int64_t c = 0; c < C; c++) store(out + c, float(x[c]) * r * float(weight[c]));
    return r;
}

template <class T>
__device__ float normalize_row_naive(T* out, const T* x, const T* weight, int64_t C, float eps) {
    double sum = 0;
    for (int64_t c = 0; c < C; c++) sum += double(float(x[c])) * double(float(x[c]));
    const float r = static_cast<float>(1 / sqrt(sum / static_cast<double>(C) + double(eps)));
    for (int64_t c = 0; c < C; c++) out[c] = T(float(x[c]) * r * float(weight[c]));
    return r;
}

// ---- vectorized: the row in registers

// Elements of a row that one thread keeps: 8, 16 or 32. More would spill the registers that a block of this many threads
// has, and so would 32 where they are loaded one at a time.
constexpr int max_forward = 32, forward_threads = 1024;

// Threads for rows of C: whole warps, no more than there is work for, enough that none keeps more than `most`
// elements.
inline int row_threads(int64_t C, int64_t most, int wanted) {
    const int64_t warp = device_properties().warp_size;
    const int64_t threads = std::min(std::max<int64_t>(wanted, (C + most - 1) / most), (C + 7) / 8);
    return static_cast<int>((threads + warp - 1) / warp * warp);
}
// 0, 1, 2: 8, 16 or 32 elements a thread.
inline int kernel_index(int64_t C, int threads) {
    return C <= int64_t{8} * threads ? 0 : C <= int64_t{16} * threads ? 1 : 2;
}
static_assert(max_forward / 2 * forward_threads == 16384, "what the limit says");
constexpr Constraints forward_fits{"C at most 16384",
                                   [](const Call& c) { return c["C"] <= max_forward / 2 * forward_threads; }};
constexpr BlockSizes row_block_sizes = blocks_of(256, 128, 512);

template <class T, int elements, bool whole, bool residual_too>
__global__ void __launch_bounds__(forward_threads)
    rmsnorm_forward_vectorized_kernel(Dependent<T*> sum_, Dependent<Rows<T>> out_, Dependent<float*> rstd_,
                                      Dependent<Rows<const T>> x_, Dependent<const T*> residual_,
                                      Dependent<const T*> weight_, int64_t C, float eps) {
    const auto [sum, out, rstd, x, residual, weight] =
        start_next_and_wait(sum_, out_, rstd_, x_, residual_, weight_);
    constexpr int size = vector_size<T>, vectors = elements / size;
    struct Shared {
        float warps[max_warps];
    };
    const int64_t row = blockIdx.x * C;  // of sum and residual
    uint4 kept[vectors], w[vectors];
    float squares = 0;
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        const int64_t c = (int64_t{v} * blockDim.x + threadIdx.x) * size;
        kept[v] = load_part<whole>(x.at(blockIdx.x), c, C);
        w[v] = load_part<whole>(weight, c, C);
        if constexpr (residual_too) {
            float a[size], b[size];
            unpack<T>(kept[v], a);
            unpack<T>(load_part<whole>(residual + row, c, C), b);
            for (int i = 0; i < size; i++) a[i] += b[i];
            kept[v] = pack<T>(a);
        }
    }
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        float a[size];
        unpack<T>(kept[v], a);
        for (int i = 0; i < size; i++) squares += a[i] * a[i];
    }
    const float mean = block_sum(squares, shared_memory<Shared>().warps) / static_cast<float>(C);
    const float r = 1.0f / sqrtf(mean + eps);
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        const int64_t c = (int64_t{v} * blockDim.x + threadIdx.x) * size;
        if constexpr (residual_too) store_part<whole>(sum + row, c, C, kept[v]);
        float a[size], b[size];
        unpack<T>(kept[v], a);
        unpack<T>(w[v], b);
        for (int i = 0; i < size; i++) a[i] = a[i] * r * b[i];
        store_part<whole>(out.at(blockIdx.x), c, C, pack<T>(a));
    }
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
}

template <class T, bool residual_too>
void launch_forward(T* sum, View<T, 2> out, float* rstd, View<const T, 2> x, const T* residual,
                    const T* weight, double eps, const LaunchContext& context) {
    using Kernel = void (*)(Dependent<T*>, Dependent<Rows<T>>, Dependent<float*>, Dependent<Rows<const T>>,
                            Dependent<const T*>, Dependent<const T*>, int64_t, float);
    static constexpr Kernel kernels[2][3] = {{rmsnorm_forward_vectorized_kernel<T, 8, false, residual_too>,
                                              rmsnorm_forward_vectorized_kernel<T, 16, false, residual_too>},
                                             {rmsnorm_forward_vectorized_kernel<T, 8, true, residual_too>,
                                              rmsnorm_forward_vectorized_kernel<T, 16, true, residual_too>,
                                              rmsnorm_forward_vectorized_kernel<T, 32, true, residual_too>}};
    const int64_t N = x.shape[0], C = x.shape[1];
    const bool whole =
        is_whole({sum, out.data, x.data, residual, weight}, C | out.stride[0] | x.stride[0], vector_size<T>);
    const int threads = row_threads(C, whole ? max_forward : max_forward / 2, context.threads);
    launch(Grid(blocks_for(N, 1), threads, context.stream), kernels[whole][kernel_index(C, threads)], sum,
           rows(out), rstd, rows(x), residual, weight, C, static_cast<float>(eps));
}

// ---- vectorized, backward: a block takes every k-th row

// Elements of a row that one thread keeps; more would spill.
constexpr int max_backward = 8, backward_threads = 1024;
static_assert(max_backward * backward_threads == 8192, "what the limit says");
constexpr Constraints backward_fits{"C at most 8192",
                                    [](const Call& c) { return c["C"] <= max_backward * backward_threads; }};

constexpr BlockSizes backward_block_sizes = blocks_of(512, 256, 1024);

// Threads (x: a row's columns, y: rows at a time).
struct BackwardShape {
    dim3 threads;
    int blocks;
};
// elements: of a row, that one thread keeps. threads: whose registers one multiprocessor holds.
inline BackwardShape backward_shape(int64_t N, int64_t C, int wanted, int elements = max_backward,
                                    int threads = backward_threads) {
    const int columns = row_threads(C, elements, 1), rows = std::max(1, wanted / columns);
    const int resident = std::max(1, threads / (columns * rows));
    const int64_t most = int64_t{device_properties().multiprocessors} * resident;
    const int64_t blocks = std::min((N + rows - 1) / rows, most);
    return {dim3(static_cast<unsigned>(columns), static_cast<unsigned>(rows)), static_cast<int>(blocks)};
}

// Rows of x and dout that a thread has in LDS or on their way there, this one too: more take LDS from other blocks. 0: they are
// loaded into registers.
template <class T, bool whole>
constexpr int rows_in_lds = copies_asynchronously && whole && narrow<T> ? 2 : 0;

// These rows, of which a thread copies and reads its own vectors alone. They take the block's dynamic LDS: `bytes` per thread.
template <int slots, int vectors>
struct RowsInLds {
    static constexpr int bytes = slots * 2 * vectors * int{sizeof(uint4)};
    static constexpr int vector_pitch = warp_size * int{sizeof(uint4)};
    const int pitch;
    char* const own;
    int slot = 0;  // of the row that is read next

    // warp: the thread's in the block. threads: of the block.
    __device__ RowsInLds(int warp, int threads)
        : pitch(threads * 2 * vectors * int{sizeof(uint4)}),
          own(dynamic_shared_memory() +
              (warp * 2 * vectors * warp_size + lane_index()) * int{sizeof(uint4)}) {}

    // Starts the copies of a row's vectors, `apart` elements apart, that are there by exists(v): of the row `ahead` rows after the
    // one that is read next.
    template <class T, class Exists>
    __device__ void copy(int ahead, const T* x, const T* dout, int apart, Exists exists) const {
        char* const to = own + (slot + ahead < slots ? slot + ahead : slot + ahead - slots) * pitch;
#pragma unroll
        for (int v = 0; v < vectors; v++) {
            copy_asynchronously(to + v * vector_pitch, x + v * apart, exists(v));
            copy_asynchronously(to + (vectors + v) * vector_pitch, dout + v * apart, exists(v));
        }
        commit_copies();
    }
    // Waits for the next row, while `slots` - 1 later ones may be on their way.
    __device__ void read(uint4 (&x)[vectors], uint4 (&dout)[vectors]) {
        wait_for_copies<slots - 1>();
        const char* const from = own + slot * pitch;
#pragma unroll
        for (int v = 0; v < vectors; v++) {
            x[v] = *reinterpret_cast<const uint4*>(from + v * vector_pitch);
            dout[v] = *reinterpret_cast<const uint4*>(from + (vectors + v) * vector_pitch);
        }
        slot = slot + 1 < slots ? slot + 1 : 0;
    }
    // After the last row: the memory is free for all threads of the block.
    __device__ static void finish() {
        wait_for_copies<0>();
        __syncthreads();
    }
};

}  // namespace llamac
