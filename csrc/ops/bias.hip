// A bias: the same row is added to all rows.
//
//   out[n,k] = x[n,k] + bias[k]
//   dbias[k] = sum_n dout[n,k]
//
// out may be x's memory. The gradient of x is dout.
//
// reference:  plain loops; the sum of a column is double.
// cpu:        rows over threads, vector lanes over columns; dbias is summed over blocks of rows, then over the blocks.
// naive:      one thread per element; backward one thread per column.
// vectorized: 128-bit accesses. Forward: a thread has the same columns in four rows, with all loads in flight before the first is
//             used, and the bias once for the four. Backward: a block sums a stretch of rows of 256 columns (in bf16), eight
//             loads per thread in flight; one partial row of dbias per stretch, added by a second kernel in their order.
#include <vector>

#include "core/operation.h"
#include "core/simd.h"
#include "ops/column_sums.h"
#include "ops/unaligned.h"

namespace llamac {
namespace {

template <class T>
void bias_forward_reference(View<T, 2> out, View<const T, 2> x, View<const T, 1> bias) {
    using A = arithmetic<T>;
    for (int64_t n = 0; n < x.shape[0]; n++)
        for (int64_t k = 0; k < x.shape[1]; k++) out(n, k) = T(A(x(n, k)) + A(bias(k)));
}

template <class T, class G>
void bias_backward_reference(View<G, 1> dbias, View<const T, 2> dout, bool accumulate) {
    for (int64_t k = 0; k < dout.shape[1]; k++) {
        double sum = accumulate ? double(dbias(k)) : 0.0;
        for (int64_t n = 0; n < dout.shape[0]; n++) sum += double(dout(n, k));
        dbias(k) = G(arithmetic<T>(sum));
    }
}

template <class T>
void bias_forward_cpu(View<T, 2> out, View<const T, 2> x, View<const T, 1> bias) {
    const int64_t N = x.shape[0], K = x.shape[1];
#pragma omp parallel for if (N > 1)
    for (int64_t n = 0; n < N; n++)
#pragma omp simd
        for (int64_t k = 0; k < K; k++)
            store(out.data + n * K + k, float(x.data[n * K + k]) + float(bias.data[k]));
}

template <class T, class G>
void bias_backward_cpu(View<G, 1> dbias, View<const T, 2> dout, bool accumulate) {
    const int64_t N = dout.shape[0], K = dout.shape[1];
    const std::vector<float> sums = column_sums(N, K, [&](int64_t first, int64_t last, float* to) {
        for (int64_t n = first; n < last; n++)
#pragma omp simd
            for (int64_t k = 0; k < K; k++) to[k] += float(dout.data[n * K + k]);
    });
    for (int64_t k = 0; k < K; k++) dbias(k) = G((accumulate ? float(dbias(k)) : 0.0f) + sums[k]);
}

// ---- naive

template <class T>
__global__ void bias_forward_naive_kernel(T* out, const T* x, const T* bias, int64_t N, int64_t K) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < N * K) out[i] = T(float(x[i]) + float(bias[i % K]));
}

template <class T>
void bias_forward_naive(View<T, 2> out, View<const T, 2> x, View<const T, 1> bias, LaunchContext context) {
    const int64_t N = x.shape[0], K = x.shape[1];
    launch(context.grid(N * K), bias_forward_naive_kernel<T>, out.data, x.data, bias.data, N, K);
}

template <class T, class G>
__global__ void bias_backward_naive_kernel(G* dbias, const T* dout, int64_t N, int64_t K, bool accumulate) {
    const int64_t k = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (k >= K) return;
    double sum = accumulate ? double(float(dbias[k])) : 0.0;
    for (int64_t n = 0; n < N; n++) sum += double(float(dout[n * K + k]));
    dbias[k] = G(static_cast<float>(sum));
}

template <class T, class G>
void bias_backward_naive(View<G, 1> dbias, View<const T, 2> dout, bool accumulate, LaunchContext context) {
    const int64_t N = dout.shape[0], K = dout.shape[1];
    launch(context.grid(K), bias_backward_naive_kernel<T, G>, dbias.data, dout.data, N, K, accumulate);
}

// ---- vectorized: 128-bit accesses

constexpr int block_threads = 512;  // at most
// One where accesses are narrow: there more addresses than registers would be in flight.
template <bool whole>
constexpr int rows_per_thread = whole || vectors_anywhere ? 4 : 1;

// A thread's rows are neighbors; `across` threads hold a row.
template <class T, bool whole>
__global__ void __launch_bounds__(block_threads)
    bias_forward_vectorized_kernel(Dependent<T*> out_, Dependent<const T*> x_, Dependent<const T*> bias_,
                                   int64_t N, int64_t K, unsigned across) {
    const auto [out, x, bias] = start_next_and_wait(out_, x_, bias_);
    constexpr int size = vector_size<T>, rows = rows_per_thread<whole>;
    const unsigned place = blockIdx.x * blockDim.x + threadIdx.x;
    const int64_t first = int64_t{place / across} * rows, k = int64_t{place % across} * size;
    uint4 own[rows];
#pragma unroll
    for (int r = 0; r < rows; r++)
        own[r] = load_row_part<whole>(x + (first + r) * K, k, first + r < N ? K : 0);
    float b[size];
    unpack<T>(load_row_part<whole>(bias, k, K), b);
#pragma unroll
    for (int r = 0; r < rows; r++) {
        float a[size];
        unpack<T>(own[r], a);
        for (int i = 0; i < size; i++) a[i] += b[i];
        store_part<whole>(out + (first + r) * K, k, first + r < N ? K : 0, pack<T>(a));
    }
}

constexpr Constraints few_vectors{"fewer than 2^31 vectors of 128 bits", [](const Call& c) {
                                      const int64_t size = 16 / size_of(c.operand("x").dtype);
                                      return c["N"] < (int64_t{1} << 31) / blocks_for(c["K"], size);
                                  }};

template <class T>
void bias_forward_vectorized(View<T, 2> out, View<const T, 2> x, View<const T, 1> bias,
                             LaunchContext context) {
    const int64_t N = x.shape[0], K = x.shape[1];
    const bool whole = is_whole({out.data, x.data, bias.data}, K, vector_size<T>);
    const unsigned across = blocks_for(K, vector_size<T>);
    const int64_t groups = blocks_for(N, whole ? rows_per_thread<true> : rows_per_thread<false>);
    launch(context.grid(groups * across),
           whole ? bias_forward_vectorized_kernel<T, true> : bias_forward_vectorized_kernel<T, false>,
           out.data, x.data, bias.data, N, K, across);
}

constexpr int tile_vectors = 32;        // of a row in a block: whole cache lines
constexpr int resident_threads = 1024;  // whose registers a multiprocessor holds
template <bool whole>
constexpr int loads_per_thread = whole || vectors_anywhere ? 8 : 1;

// Threads (x: vectors of a row, y: rows at a time). Block (x: columns, y: rows [y * stretch, (y + 1) * stretch)), whose sums are
// row y of partial[gridDim.y, K]. Dynamic LDS: a vector of floats per thread.
template <class T, bool whole>
__global__ void __launch_bounds__(block_threads)
    bias_backward_vectorized_kernel(Dependent<float*> partial_, Dependent<const T*> dout_, int64_t N,
                                    int64_t K, int64_t stretch) {
    const auto [partial, dout] = start_next_and_wait(partial_, dout_);
    constexpr int size = vector_size<T>, loads = loads_per_thread<whole>;
    const int64_t first_column = int64_t{blockIdx.x} * blockDim.x * size;
    const int64_t k = first_column + threadIdx.x * size, down = blockDim.y;
    const int64_t begin = blockIdx.y * stretch, end = begin + stretch < N ? begin + stretch : N;
    float sum[size] = {};
    const auto load = [=](int64_t n) { return load_row_part<whole>(dout + n * K, k, K); };
    const auto add = [&sum](uint4 bits) {
        float a[size];
        unpack<T>(bits, a);
        for (int j = 0; j < size; j++) sum[j] += a[j];
    };
    int64_t n = k < K ? begin + threadIdx.y : end;
    for (; n + (loads - 1) * down < end; n += loads * down) {
        uint4 bits[loads];
#pragma unroll
        for (int i = 0; i < loads; i++) bits[i] = load(n + i * down);
#pragma unroll
        for (int i = 0; i < loads; i++) add(bits[i]);
    }
    for (; n < end; n += down) add(load(n));
    float* const sums = reinterpret_cast<float*>(dynamic_shared_memory());
    const unsigned columns = blockDim.x * size;
    for (int j = 0; j < size; j++) sums[threadIdx.y * columns + threadIdx.x * size + j] = sum[j];
    __syncthreads();
    for (unsigned c = threadIdx.y * blockDim.x + threadIdx.x; c < columns; c += blockDim.x * blockDim.y) {
        float all = 0;
        for (unsigned y = 0; y < blockDim.y; y++) all += sums[y * columns + c];
        if (first_column + c < K) partial[blockIdx.y * K + first_column + c] = all;
    }
}

template <class G>
__global__ void bias_backward_vectorized_kernel_columns(Dependent<G*> dbias_,
                                                        Dependent<const float*> partial_, int rows, int64_t K,
                                                        bool accumulate) {
    const auto [dbias, partial] = wait(dbias_, partial_);
    sum_columns(dbias, partial, rows, K, accumulate);
}

struct BackwardShape {
    dim3 blocks, threads;
    int64_t stretch;
};
// As many blocks as are resident, all with stretches of the same length.
BackwardShape backward_shape(int64_t N, int64_t K, int size, int threads) {
    const unsigned across = std::min<unsigned>(blocks_for(K, size), tile_vectors), down = threads / across;
    const unsigned tiles = blocks_for(K, int64_t{across} * size);
    const int64_t resident = int64_t{device_properties().multiprocessors} * (resident_threads / threads);
    const int64_t most = std::max<int64_t>(1, resident / tiles),
                  step = int64_t{down} * loads_per_thread<true>;
    const int64_t stretch = blocks_for(N, most * step) * step;
    return {dim3(tiles, blocks_for(N, stretch)), dim3(across, down), stretch};
}
BackwardShape backward_shape(const Call& c) {
    return backward_shape(c["N"], c["K"], static_cast<int>(16 / size_of(c.operand("dout").dtype)),
                          c.launch.threads);
}

template <class T, class G>
void bias_backward_vectorized(View<G, 1> dbias, View<const T, 2> dout, bool accumulate,
                              LaunchContext context) {
    const int64_t N = dout.shape[0], K = dout.shape[1];
    const BackwardShape shape = backward_shape(N, K, vector_size<T>, context.threads);
    const bool whole = is_whole({dout.data}, K, vector_size<T>);
    float* const partial = static_cast<float*>(context.workspace);
    launch(Grid(shape.blocks, shape.threads, context.stream,
                size_t{shape.threads.x} * shape.threads.y * vector_size<T> * sizeof(float)),
           whole ? bias_backward_vectorized_kernel<T, true> : bias_backward_vectorized_kernel<T, false>,
           partial, dout.data, N, K, shape.stretch);
    launch(columns_grid(K, context.stream), bias_backward_vectorized_kernel_columns<G>, dbias.data, partial,
           static_cast<int>(shape.blocks.y), K, accumulate);
}

Operation bias_forward(
    "bias_forward<T: f32 bf16 fp16 f64>(out: T[N,K] may_share(x); x: T[N,K], bias: T[K]) rows(N) empty(N)"
    " derivative bias_backward(dbias: grad bias; dout: grad out) grad x = grad out",
    "out = x + bias",
    {{"cpu", "rows over threads, vector lanes over columns",
      instantiations<LLAMAC_FLOATS(bias_forward_cpu)>()},
     {"vectorized", "four rows per thread share the bias, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(bias_forward_vectorized)>(), few_vectors,
      blocks_of(256, 128, block_threads)},
     {"naive", "one thread per element", instantiations<LLAMAC_KERNELS(bias_forward_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(bias_forward_reference), bias_forward_reference<double>>()}},
    [](const Call& c) { return 1.0 * c["N"] * c["K"]; });

Operation bias_backward(
    "bias_backward<T: f32 bf16 fp16 f64, G: f32 bf16 f64>"
    "(dbias: G[K] adds_if(accumulate); dout: T[N,K]; accumulate: bool) rows(N) empty(N)",
    "gradient of bias_forward's bias: the sums of dout's columns",
    {{"cpu", "blocks of rows over threads",
      instantiations<LLAMAC_FLOATS(bias_backward_cpu, float), bias_backward_cpu<bf16, bf16>>()},
     {"vectorized", "stretches of rows, 128-bit accesses, one partial row per stretch",
      instantiations<LLAMAC_KERNELS(bias_backward_vectorized, float), bias_backward_vectorized<bf16, bf16>>(),
      nullptr, blocks_of(block_threads, 256, 128),
      [](const Call& c) { return int64_t{backward_shape(c).blocks.y} * c["K"] * 4; }},
     {"naive", "one thread per column",
      instantiations<LLAMAC_KERNELS(bias_backward_naive, float), bias_backward_naive<bf16, bf16>>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(bias_backward_reference, float), bias_backward_reference<bf16, bf16>,
                     bias_backward_reference<double, double>>()}},
    [](const Call& c) { return 1.0 * c["N"] * c["K"]; });

}  // namespace
}  // namespace llamac
