// RMSNorm (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019): every row is divided by its
// root mean square and scaled by a weight a column.
//
//   rstd[n]   = 1 / sqrt(mean_c x[n,c]^2 + eps)
//   out[n,c]  = x[n,c] * rstd[n] * weight[c]
//
//   with g[n,c] = dout[n,c] * weight[c] and xhat = x * rstd:
//   dx[n,c]    = rstd[n] * (g[n,c] - xhat[n,c] * mean_c(g[n,c] * xhat[n,c])) (+ dresidual[n,c], the
//                gradient that reaches x past the norm)
//   dweight[c] = sum_n dout[n,c] * xhat[n,c]
//
// residual_rmsnorm_forward: sum = x + residual, rounded to storage first, then the norm of that sum, so that
// backward, which reads the stored sum, sees the same rows.
//
// sum may be x's or residual's memory, dx may be dresidual's or dout's.
//
// reference: plain loops. Sums over a row or a column are double whatever the storage: a serial float sum of
//            some thousand terms loses more than PyTorch's, which adds in vector lanes.
// cpu:       rows over threads, a row stays in the first cache between its two passes. dweight is summed over
//            blocks of rows that N alone determines, then over the blocks, so that the bits do not depend on
//            the threads.
// 1          naive: a thread a row, a thread a column for dweight.
// 2          a block a row, 128-bit accesses, the row stays in registers between the sum and the product: every
//            byte moves once. Backward: a block takes every k-th row and keeps its share of dweight in
//            registers too, so that dweight is one partial row a block, added by a second kernel in their order.
#include <algorithm>
#include <cmath>

#include "core/device.h"
#include "core/registry.h"
#include "core/simd.h"

namespace llamac {
namespace {

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
void residual_rmsnorm_forward_reference(View<T, 2> sum, View<T, 2> out, View<arithmetic<T>, 1> rstd,
                                        View<const T, 2> x, View<const T, 2> residual,
                                        View<const T, 1> weight, double eps) {
    using A = arithmetic<T>;
    const int64_t N = x.shape[0], C = x.shape[1];
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) sum(n, c) = T(A(x(n, c)) + A(residual(n, c)));
    const View<const T, 2> rows{sum.data, {N, C}, {sum.stride[0], sum.stride[1]}};
    rmsnorm_forward_reference<T>(out, rstd, rows, weight, eps);
}

template <class T, class G>
void rmsnorm_backward_reference(View<T, 2> dx, View<G, 1> dweight, View<const T, 2> dout, View<const T, 2> x,
                                View<const T, 1> weight, View<const arithmetic<T>, 1> rstd,
                                View<const T, 2> dresidual, bool accumulate) {
    using A = arithmetic<T>;
    const int64_t N = x.shape[0], C = x.shape[1];
    std::vector<double> dw(C, 0);
    for (int64_t n = 0; n < N; n++) {
        double dot = 0;
        for (int64_t c = 0; c < C; c++) {
            const A xhat = A(x(n, c)) * rstd(n);
            dot += double(A(dout(n, c)) * A(weight(c))) * double(xhat);
            dw[c] += double(dout(n, c)) * double(xhat);
        }
        const A mean = A(dot / double(C));
        for (int64_t c = 0; c < C; c++) {
            const A g = A(dout(n, c)) * A(weight(c)), xhat = A(x(n, c)) * rstd(n);
            const A past = dresidual ? A(dresidual(n, c)) : A(0);
            dx(n, c) = T(rstd(n) * (g - xhat * mean) + past);
        }
    }
    for (int64_t c = 0; c < C; c++) dweight(c) = G(A((accumulate ? double(dweight(c)) : 0.0) + dw[c]));
}

template <class T>
float normalise_row(T* out, const T* x, const T* weight, int64_t C, double eps) {
    const double sum = block_sum(C, [x](int64_t c) { return float(x[c]) * float(x[c]); });
    const float r = static_cast<float>(1 / std::sqrt(sum / static_cast<double>(C) + eps));
#pragma omp simd
    for (int64_t c = 0; c < C; c++) store(out + c, float(x[c]) * r * float(weight[c]));
    return r;
}

template <class T>
void rmsnorm_forward_cpu(View<T, 2> out, View<float, 1> rstd, View<const T, 2> x, View<const T, 1> weight,
                         double eps) {
    const int64_t N = x.shape[0], C = x.shape[1];
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) rstd(n) = normalise_row(&out(n, 0), &x(n, 0), weight.data, C, eps);
}

template <class T>
void residual_rmsnorm_forward_cpu(View<T, 2> sum, View<T, 2> out, View<float, 1> rstd, View<const T, 2> x,
                                  View<const T, 2> residual, View<const T, 1> weight, double eps) {
    const int64_t N = x.shape[0], C = x.shape[1];
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        const T *a = &x(n, 0), *b = &residual(n, 0);
        T* s = &sum(n, 0);
#pragma omp simd
        for (int64_t c = 0; c < C; c++) store(s + c, float(a[c]) + float(b[c]));
        rstd(n) = normalise_row(&out(n, 0), s, weight.data, C, eps);
    }
}

// One row of the backward pass; dw[C] gathers its share of dweight. past: dresidual's row, or null.
template <class T>
void rmsnorm_backward_row(T* dx, float* dw, const T* dout, const T* x, const T* weight, float r,
                          const T* past, int64_t C) {
    const double dot =
        block_sum(C, [=](int64_t c) { return float(dout[c]) * float(weight[c]) * (float(x[c]) * r); });
    const float mean = static_cast<float>(dot / static_cast<double>(C));
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
        const float d = float(dout[c]), xhat = float(x[c]) * r;
        dw[c] += d * xhat;
        store(dx + c, r * (d * float(weight[c]) - xhat * mean) + (past ? float(past[c]) : 0.0f));
    }
}

template <class T, class G>
void rmsnorm_backward_cpu(View<T, 2> dx, View<G, 1> dweight, View<const T, 2> dout, View<const T, 2> x,
                          View<const T, 1> weight, View<const float, 1> rstd, View<const T, 2> dresidual,
                          bool accumulate) {
    const int64_t N = x.shape[0], C = x.shape[1];
    const int64_t rows = std::max<int64_t>(32, (N + 63) / 64), blocks = (N + rows - 1) / rows;
    std::vector<float> partial(blocks * C, 0.0f);
#pragma omp parallel for
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t n = b * rows; n < std::min(N, (b + 1) * rows); n++)
            rmsnorm_backward_row(&dx(n, 0), &partial[b * C], &dout(n, 0), &x(n, 0), weight.data, rstd(n),
                                 dresidual ? &dresidual(n, 0) : nullptr, C);
    std::vector<float> dw(C, 0.0f);
    for (int64_t b = 0; b < blocks; b++)
#pragma omp simd
        for (int64_t c = 0; c < C; c++) dw[c] += partial[b * C + c];
    for (int64_t c = 0; c < C; c++) dweight(c) = G((accumulate ? float(dweight(c)) : 0.0f) + dw[c]);
}

// ---- 1: naive

template <class T>
__device__ float normalise_row_naive(T* out, const T* x, const T* weight, int64_t C, float eps) {
    double sum = 0;
    for (int64_t c = 0; c < C; c++) sum += double(float(x[c])) * double(float(x[c]));
    const float r = static_cast<float>(1 / sqrt(sum / static_cast<double>(C) + double(eps)));
    for (int64_t c = 0; c < C; c++) out[c] = T(float(x[c]) * r * float(weight[c]));
    return r;
}

template <class T>
__global__ void rmsnorm_forward_kernel1(T* out, float* rstd, const T* x, const T* weight, int64_t N,
                                        int64_t C, float eps) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (n < N) rstd[n] = normalise_row_naive(out + n * C, x + n * C, weight, C, eps);
}

template <class T>
void rmsnorm_forward_1(View<T, 2> out, View<float, 1> rstd, View<const T, 2> x, View<const T, 1> weight,
                       double eps, Device device) {
    const int64_t N = x.shape[0], C = x.shape[1];
    launch(Grid(blocks_for(N, device.threads), device.threads, device.stream), rmsnorm_forward_kernel1<T>,
           out.data, rstd.data, x.data, weight.data, N, C, eps);
}

template <class T>
__global__ void residual_rmsnorm_forward_kernel1(T* sum, T* out, float* rstd, const T* x, const T* residual,
                                                 const T* weight, int64_t N, int64_t C, float eps) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (n >= N) return;
    for (int64_t c = n * C; c < (n + 1) * C; c++) sum[c] = T(float(x[c]) + float(residual[c]));
    rstd[n] = normalise_row_naive(out + n * C, sum + n * C, weight, C, eps);
}

template <class T>
void residual_rmsnorm_forward_1(View<T, 2> sum, View<T, 2> out, View<float, 1> rstd, View<const T, 2> x,
                                View<const T, 2> residual, View<const T, 1> weight, double eps,
                                Device device) {
    const int64_t N = x.shape[0], C = x.shape[1];
    launch(Grid(blocks_for(N, device.threads), device.threads, device.stream),
           residual_rmsnorm_forward_kernel1<T>, sum.data, out.data, rstd.data, x.data, residual.data,
           weight.data, N, C, eps);
}

template <class T>
__global__ void rmsnorm_backward_kernel1(T* dx, const T* dout, const T* x, const T* weight, const float* rstd,
                                         const T* dresidual, int64_t N, int64_t C) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const float r = rstd[n];
    double dot = 0;
    for (int64_t c = 0; c < C; c++)
        dot += double(float(dout[n * C + c]) * float(weight[c])) * double(float(x[n * C + c]) * r);
    const float mean = static_cast<float>(dot / static_cast<double>(C));
    for (int64_t c = 0; c < C; c++) {
        const int64_t i = n * C + c;
        const float past = dresidual ? float(dresidual[i]) : 0.0f;
        dx[i] = T(r * (float(dout[i]) * float(weight[c]) - float(x[i]) * r * mean) + past);
    }
}

template <class T, class G>
__global__ void rmsnorm_backward_kernel1_columns(G* dweight, const T* dout, const T* x, const float* rstd,
                                                 int64_t N, int64_t C, bool accumulate) {
    const int64_t c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (c >= C) return;
    double sum = accumulate ? double(float(dweight[c])) : 0.0;
    for (int64_t n = 0; n < N; n++)
        sum += double(float(dout[n * C + c])) * double(float(x[n * C + c]) * rstd[n]);
    dweight[c] = G(static_cast<float>(sum));
}

template <class T, class G>
void rmsnorm_backward_1(View<T, 2> dx, View<G, 1> dweight, View<const T, 2> dout, View<const T, 2> x,
                        View<const T, 1> weight, View<const float, 1> rstd, View<const T, 2> dresidual,
                        bool accumulate, Device device) {
    const int64_t N = x.shape[0], C = x.shape[1];
    // dweight first: dx may take dout's place.
    launch(Grid(blocks_for(C, device.threads), device.threads, device.stream),
           rmsnorm_backward_kernel1_columns<T, G>, dweight.data, dout.data, x.data, rstd.data, N, C,
           accumulate);
    launch(Grid(blocks_for(N, device.threads), device.threads, device.stream), rmsnorm_backward_kernel1<T>,
           dx.data, dout.data, x.data, weight.data, rstd.data, dresidual.data, N, C);
}

// ---- 2: the row in registers

// Elements of a row that one thread keeps: 8, 16 or 32 forward, 8 or 16 backward. More would spill the
// registers that a block of this many threads has, and so would twice that many where they are loaded one at
// a time.
constexpr int most_forward = 32, forward_threads = 1024;
constexpr int most_backward = 16, backward_threads = 512;

// Threads for rows of C: whole warps, no more than there is work for, enough that none keeps more than `most`
// elements.
int row_threads(int64_t C, int64_t most, int wanted) {
    const int64_t warp = device_properties().warp_size;
    const int64_t threads = std::min(std::max<int64_t>(wanted, (C + most - 1) / most), (C + 7) / 8);
    return static_cast<int>((threads + warp - 1) / warp * warp);
}
// 0, 1, 2: 8, 16 or 32 elements a thread.
int kernel_index(int64_t C, int threads) {
    return C <= int64_t{8} * threads ? 0 : C <= int64_t{16} * threads ? 1 : 2;
}
bool forward_fits(const Call& c) {
    return c["C"] <= most_forward / 2 * forward_threads;
}
bool backward_fits(const Call& c) {
    return c["C"] <= most_backward / 2 * backward_threads;
}

template <class T, int elements, bool whole, bool residual_too>
__global__ void __launch_bounds__(forward_threads)
    rmsnorm_forward_kernel2(T* sum, T* out, float* rstd, const T* x, const T* residual, const T* weight,
                            int64_t C, float eps) {
    constexpr int size = vector_size<T>, vectors = elements / size;
    struct Shared {
        float warps[most_warps];
    };
    const int64_t row = blockIdx.x * C;
    uint4 kept[vectors], w[vectors];
    float squares = 0;
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        const int64_t c = (int64_t{v} * blockDim.x + threadIdx.x) * size;
        kept[v] = load_part<whole>(x + row, c, C);
        w[v] = load_part<whole>(weight, c, C);
        if constexpr (residual_too) {
            float a[size], b[size];
            unpack(kept[v], a);
            unpack(load_part<whole>(residual + row, c, C), b);
            for (int i = 0; i < size; i++) a[i] += b[i];
            kept[v] = pack(a);
        }
    }
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        float a[size];
        unpack(kept[v], a);
        for (int i = 0; i < size; i++) squares += a[i] * a[i];
    }
    const float mean = block_sum(squares, shared_memory<Shared>().warps) / static_cast<float>(C);
    const float r = 1.0f / sqrtf(mean + eps);
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        const int64_t c = (int64_t{v} * blockDim.x + threadIdx.x) * size;
        if constexpr (residual_too) store_part<whole>(sum + row, c, C, kept[v]);
        float a[size], b[size];
        unpack(kept[v], a);
        unpack(w[v], b);
        for (int i = 0; i < size; i++) a[i] = a[i] * r * b[i];
        store_part<whole>(out + row, c, C, pack(a));
    }
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
}

template <class T, bool residual_too>
void launch_forward_2(T* sum, T* out, float* rstd, const T* x, const T* residual, const T* weight, int64_t N,
                      int64_t C, float eps, const Device& device) {
    using Kernel = void (*)(T*, T*, float*, const T*, const T*, const T*, int64_t, float);
    static constexpr Kernel kernels[2][3] = {{rmsnorm_forward_kernel2<T, 8, false, residual_too>,
                                              rmsnorm_forward_kernel2<T, 16, false, residual_too>},
                                             {rmsnorm_forward_kernel2<T, 8, true, residual_too>,
                                              rmsnorm_forward_kernel2<T, 16, true, residual_too>,
                                              rmsnorm_forward_kernel2<T, 32, true, residual_too>}};
    const bool whole = is_whole({sum, out, x, residual, weight}, C, vector_size<T>);
    const int threads = row_threads(C, whole ? most_forward : most_forward / 2, device.threads);
    launch(Grid(blocks_for(N, 1), threads, device.stream), kernels[whole][kernel_index(C, threads)], sum, out,
           rstd, x, residual, weight, C, eps);
}

template <class T>
void rmsnorm_forward_2(View<T, 2> out, View<float, 1> rstd, View<const T, 2> x, View<const T, 1> weight,
                       double eps, Device device) {
    launch_forward_2<T, false>(nullptr, out.data, rstd.data, x.data, nullptr, weight.data, x.shape[0],
                               x.shape[1], static_cast<float>(eps), device);
}

template <class T>
void residual_rmsnorm_forward_2(View<T, 2> sum, View<T, 2> out, View<float, 1> rstd, View<const T, 2> x,
                                View<const T, 2> residual, View<const T, 1> weight, double eps,
                                Device device) {
    launch_forward_2<T, true>(sum.data, out.data, rstd.data, x.data, residual.data, weight.data, x.shape[0],
                              x.shape[1], static_cast<float>(eps), device);
}

// A block's rows are blockIdx.x, blockIdx.x + gridDim.x, ...; partial[gridDim.x, C] gets its sums of dweight.
template <class T, int elements, bool whole>
__global__ void __launch_bounds__(backward_threads)
    rmsnorm_backward_kernel2(T* dx, float* partial, const T* dout, const T* x, const T* weight,
                             const float* rstd, const T* dresidual, int64_t N, int64_t C) {
    constexpr int size = vector_size<T>, vectors = elements / size;
    struct Shared {
        float warps[2][most_warps];  // two: a row's sums are read while the next one's are written
    };
    Shared& shared = shared_memory<Shared>();
    uint4 w[vectors];
    float dweight[vectors][size] = {};
#pragma unroll
    for (int v = 0; v < vectors; v++)
        w[v] = load_part<whole>(weight, (int64_t{v} * blockDim.x + threadIdx.x) * size, C);
    int buffer = 0;
    for (int64_t n = blockIdx.x; n < N; n += gridDim.x, buffer ^= 1) {
        const float r = rstd[n];
        uint4 xs[vectors], douts[vectors], pasts[vectors];
#pragma unroll
        for (int v = 0; v < vectors; v++) {
            const int64_t c = (int64_t{v} * blockDim.x + threadIdx.x) * size;
            xs[v] = load_part<whole>(x + n * C, c, C);
            douts[v] = load_part<whole>(dout + n * C, c, C);
            pasts[v] = dresidual ? load_part<whole>(dresidual + n * C, c, C) : make_uint4(0, 0, 0, 0);
        }
        float dot = 0;
#pragma unroll
        for (int v = 0; v < vectors; v++) {
            float a[size], d[size], b[size];
            unpack(xs[v], a);
            unpack(douts[v], d);
            unpack(w[v], b);
            for (int i = 0; i < size; i++) {
                const float xhat = a[i] * r;
                dweight[v][i] += d[i] * xhat;
                dot += d[i] * b[i] * xhat;
            }
        }
        const float mean = block_sum(dot, shared.warps[buffer]) / static_cast<float>(C);
#pragma unroll
        for (int v = 0; v < vectors; v++) {
            float a[size], d[size], b[size], past[size];
            unpack(xs[v], a);
            unpack(douts[v], d);
            unpack(w[v], b);
            unpack(pasts[v], past);
            for (int i = 0; i < size; i++) a[i] = r * (d[i] * b[i] - a[i] * r * mean) + past[i];
            store_part<whole>(dx + n * C, (int64_t{v} * blockDim.x + threadIdx.x) * size, C, pack(a));
        }
    }
#pragma unroll
    for (int v = 0; v < vectors; v++)
        for (int i = 0; i < size; i++) {
            const int64_t c = (int64_t{v} * blockDim.x + threadIdx.x) * size + i;
            if (c < C) partial[blockIdx.x * C + c] = dweight[v][i];
        }
}

// dweight[c] = the sum of partial[rows, C]: a block has one column a lane, its warps share out the rows.
template <class G>
__global__ void rmsnorm_backward_kernel2_columns(G* dweight, const float* partial, int rows, int64_t C,
                                                 bool accumulate) {
    struct Shared {
        float sums[most_warps][warp_size];
    };
    Shared& shared = shared_memory<Shared>();
    const int64_t c = int64_t{blockIdx.x} * warp_size + lane_index();
    const int warps = static_cast<int>(blockDim.x) / warp_size;
    float sum = 0;
    for (int row = warp_index(); c < C && row < rows; row += warps) sum += partial[row * C + c];
    shared.sums[warp_index()][lane_index()] = sum;
    __syncthreads();
    if (warp_index() != 0 || c >= C) return;
    for (int w = 1; w < warps; w++) sum += shared.sums[w][lane_index()];
    dweight[c] = G((accumulate ? float(dweight[c]) : 0.0f) + sum);
}

struct BackwardShape {
    bool whole;
    int threads, blocks;
};
BackwardShape backward_shape(const void* dx, const void* dout, const void* x, const void* weight,
                             const void* dresidual, int64_t N, int64_t C, int size, int wanted) {
    const bool whole = is_whole({dx, dout, x, weight, dresidual}, C, size);
    const int threads = row_threads(C, whole ? most_backward : most_backward / 2, wanted);
    const int resident = std::max(1, 1024 / threads);  // blocks whose registers a multiprocessor holds
    const int64_t most = int64_t{device_properties().multiprocessors} * resident;
    return {whole, threads, static_cast<int>(std::min(N, most))};
}
int64_t backward_workspace(const Call& c) {
    const auto data = [&](const char* name) { return c.operand(name).data; };
    const int size = static_cast<int>(16 / size_of(c.operand("x").dtype));
    return backward_shape(data("dx"), data("dout"), data("x"), data("weight"), data("dresidual"), c["N"],
                          c["C"], size, c.device.threads)
               .blocks *
           c["C"] * 4;
}

template <class T, class G>
void rmsnorm_backward_2(View<T, 2> dx, View<G, 1> dweight, View<const T, 2> dout, View<const T, 2> x,
                        View<const T, 1> weight, View<const float, 1> rstd, View<const T, 2> dresidual,
                        bool accumulate, Device device) {
    using Kernel =
        void (*)(T*, float*, const T*, const T*, const T*, const float*, const T*, int64_t, int64_t);
    static constexpr Kernel kernels[2][2] = {
        {rmsnorm_backward_kernel2<T, 8, false>},
        {rmsnorm_backward_kernel2<T, 8, true>, rmsnorm_backward_kernel2<T, 16, true>}};
    const int64_t N = x.shape[0], C = x.shape[1];
    const BackwardShape shape = backward_shape(dx.data, dout.data, x.data, weight.data, dresidual.data, N, C,
                                               vector_size<T>, device.threads);
    float* partial = static_cast<float*>(device.workspace);
    launch(Grid(shape.blocks, shape.threads, device.stream),
           kernels[shape.whole][kernel_index(C, shape.threads)], dx.data, partial, dout.data, x.data,
           weight.data, rstd.data, dresidual.data, N, C);
    launch(Grid(blocks_for(C, device_properties().warp_size), most_threads, device.stream),
           rmsnorm_backward_kernel2_columns<G>, dweight.data, partial, shape.blocks, C, accumulate);
}

const std::vector<int> row_block_sizes = {256, 128, 512};

Operation rmsnorm_forward("rmsnorm_forward(out: T[N,C], rstd: A[N]; x: T[N,C], weight: T[C]; eps: float)",
                          "out = x / rms(x) * weight",
                          {{"cpu", "rows over threads, vector lanes over columns", Where::host,
                            entries<rmsnorm_forward_cpu<float>, rmsnorm_forward_cpu<bf16>>()},
                           {"2", "a block a row, which stays in registers, 128-bit accesses", Where::device,
                            entries<rmsnorm_forward_2<float>, rmsnorm_forward_2<bf16>>(), forward_fits,
                            row_block_sizes},
                           {"1", "naive: a thread a row", Where::device,
                            entries<rmsnorm_forward_1<float>, rmsnorm_forward_1<bf16>>()},
                           {"reference", "plain loops", Where::host,
                            entries<rmsnorm_forward_reference<float>, rmsnorm_forward_reference<bf16>,
                                    rmsnorm_forward_reference<double>>()}},
                          [](const Call& c) { return 4.0 * c["N"] * c["C"]; });

Operation residual_rmsnorm_forward(
    "residual_rmsnorm_forward(sum: T[N,C], out: T[N,C], rstd: A[N];"
    " x: T[N,C], residual: T[N,C], weight: T[C]; eps: float)",
    "sum = x + residual, out = sum / rms(sum) * weight",
    {{"cpu", "rows over threads, vector lanes over columns", Where::host,
      entries<residual_rmsnorm_forward_cpu<float>, residual_rmsnorm_forward_cpu<bf16>>()},
     {"2", "a block a row, which stays in registers, 128-bit accesses", Where::device,
      entries<residual_rmsnorm_forward_2<float>, residual_rmsnorm_forward_2<bf16>>(), forward_fits,
      row_block_sizes},
     {"1", "naive: a thread a row", Where::device,
      entries<residual_rmsnorm_forward_1<float>, residual_rmsnorm_forward_1<bf16>>()},
     {"reference", "plain loops", Where::host,
      entries<residual_rmsnorm_forward_reference<float>, residual_rmsnorm_forward_reference<bf16>,
              residual_rmsnorm_forward_reference<double>>()}},
    [](const Call& c) { return 5.0 * c["N"] * c["C"]; });

Operation rmsnorm_backward(
    "rmsnorm_backward(dx: T[N,C], dweight +=: G[C];"
    " dout: T[N,C], x: T[N,C], weight: T[C], rstd: A[N], dresidual?: T[N,C]; accumulate: bool)",
    "gradients of rmsnorm_forward, and of residual_rmsnorm_forward with the sum as x",
    {{"cpu", "rows over threads; dweight by blocks of rows", Where::host,
      entries<rmsnorm_backward_cpu<float, float>, rmsnorm_backward_cpu<bf16, bf16>,
              rmsnorm_backward_cpu<bf16, float>>()},
     {"2", "rows in registers, 128-bit accesses, dweight as a partial row a block", Where::device,
      entries<rmsnorm_backward_2<float, float>, rmsnorm_backward_2<bf16, bf16>,
              rmsnorm_backward_2<bf16, float>>(),
      backward_fits, row_block_sizes, backward_workspace},
     {"1", "naive: a thread a row, a thread a column for dweight", Where::device,
      entries<rmsnorm_backward_1<float, float>, rmsnorm_backward_1<bf16, bf16>,
              rmsnorm_backward_1<bf16, float>>()},
     {"reference", "plain loops", Where::host,
      entries<rmsnorm_backward_reference<float, float>, rmsnorm_backward_reference<bf16, bf16>,
              rmsnorm_backward_reference<bf16, float>, rmsnorm_backward_reference<double, double>>()}},
    [](const Call& c) { return 10.0 * c["N"] * c["C"]; });

}  // namespace
}  // namespace llamac
