// RMSNorm (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019): every row is divided by its root mean square and
// scaled by a weight per column.
//
//   rstd[n]   = 1 / sqrt(mean_c x[n,c]^2 + eps)
//   out[n,c]  = x[n,c] * rstd[n] * weight[c]
//
//   with g[n,c] = dout[n,c] * weight[c] and xhat = x * rstd:
//   dx[n,c]    = rstd[n] * (g[n,c] - xhat[n,c] * mean_c(g[n,c] * xhat[n,c])) (+ dresidual[n,c], the gradient past the norm)
//   dweight[c] = sum_n dout[n,c] * xhat[n,c]
//   out        = optional: recomputes the forward output, the same bits
//
// out may be x's memory, dx dresidual's or dout's. Rows may lie apart: OLMo 2's norms are of the queries, or the keys, of a row.
//
// reference:  plain loops. Sums over a row or a column are double for all types: a serial float sum of some thousand terms loses
//             more than PyTorch's, which adds in vector lanes.
// cpu:        rows over threads, a row stays in the first cache between its two passes. dweight is summed over blocks of rows
//             that N alone determines, then over the blocks, so that the bits do not depend on the threads.
// naive:      one thread per row, one thread per column for dweight.
// vectorized: one block per row, 128-bit accesses, the row stays in registers between the sum and the product: every byte moves
//             once. Backward: a block takes every k-th row, loads later ones while it computes one, and keeps its share of dweight
//             in registers too: one partial row of dweight per block, added by a second kernel in their order.
//
// rmsnorm.h has the parts of the forward pass that residual_rmsnorm.hip shares. Measured: docs/benchmarks/nvidia-h200.md.
#include "ops/rmsnorm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/column_sums.h"

namespace llamac {
namespace {

template <class T, class G>
void rmsnorm_backward_reference(View<T, 2> dx, View<G, 1> dweight, View<T, 2> out, View<const T, 2> dout,
                                View<const T, 2> x, View<const T, 1> weight,
                                View<const arithmetic<T>, 1> rstd, View<const T, 2> dresidual,
                                bool accumulate) {
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
            // Of two products, a compiler may fuse either with the subtraction, and another one where it vectorizes the loop.
            dx(n, c) = T(std::fma(rstd(n), std::fma(-xhat, mean, g), past));
            if (out) out(n, c) = T(xhat * A(weight(c)));
        }
    }
    for (int64_t c = 0; c < C; c++) dweight(c) = G(A((accumulate ? double(dweight(c)) : 0.0) + dw[c]));
}

template <class T>
void rmsnorm_forward_cpu(View<T, 2> out, View<float, 1> rstd, View<const T, 2> x, View<const T, 1> weight,
                         double eps) {
    const int64_t N = x.shape[0], C = x.shape[1];
#pragma omp parallel for if (N > 1)
    for (int64_t n = 0; n < N; n++) rstd(n) = normalize_row(&out(n, 0), &x(n, 0), weight.data, C, eps);
}

// One row of the backward pass; dw[C] gathers its share of dweight. out and past, dresidual's row, may be null.
template <class T>
void rmsnorm_backward_row(T* dx, float* dw, T* out, const T* dout, const T* x, const T* weight, float r,
                          const T* past, int64_t C) {
    const double dot =
        block_sum(C, [=](int64_t c) { return float(dout[c]) * float(weight[c]) * (float(x[c]) * r); });
    const float mean = static_cast<float>(dot / static_cast<double>(C));
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
        const float d = float(dout[c]), xhat = float(x[c]) * r;
        dw[c] += d * xhat;
        store(dx + c, r * (d * float(weight[c]) - xhat * mean) + (past ? float(past[c]) : 0.0f));
        if (out) store(out + c, xhat * float(weight[c]));
    }
}

template <class T, class G>
void rmsnorm_backward_cpu(View<T, 2> dx, View<G, 1> dweight, View<T, 2> out, View<const T, 2> dout,
                          View<const T, 2> x, View<const T, 1> weight, View<const float, 1> rstd,
                          View<const T, 2> dresidual, bool accumulate) {
    const int64_t N = x.shape[0], C = x.shape[1];
    const std::vector<float> dw = column_sums(N, C, [&](int64_t first, int64_t last, float* sums) {
        for (int64_t n = first; n < last; n++)
            rmsnorm_backward_row(&dx(n, 0), sums, out ? &out(n, 0) : nullptr, &dout(n, 0), &x(n, 0),
                                 weight.data, rstd(n), dresidual ? &dresidual(n, 0) : nullptr, C);
    });
    for (int64_t c = 0; c < C; c++) dweight(c) = G((accumulate ? float(dweight(c)) : 0.0f) + dw[c]);
}

// ---- naive

template <class T>
__global__ void rmsnorm_forward_naive_kernel(Rows<T> out, float* rstd, Rows<const T> x, const T* weight,
                                             int64_t N, int64_t C, float eps) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (n < N) rstd[n] = normalize_row_naive(out.at(n), x.at(n), weight, C, eps);
}

template <class T>
void rmsnorm_forward_naive(View<T, 2> out, View<float, 1> rstd, View<const T, 2> x, View<const T, 1> weight,
                           double eps, LaunchContext context) {
    const int64_t N = x.shape[0], C = x.shape[1];
    launch(context.grid(N), rmsnorm_forward_naive_kernel<T>, rows(out), rstd.data, rows(x), weight.data, N, C,
           eps);
}

template <class T>
__global__ void rmsnorm_backward_naive_kernel(Rows<T> dx_, T* out, Rows<const T> dout_, Rows<const T> x_,
                                              const T* weight, const float* rstd, const T* dresidual,
                                              int64_t N, int64_t C) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const T *dout = dout_.at(n), *x = x_.at(n);
    T* const dx = dx_.at(n);
    const float r = rstd[n];
    double dot = 0;
    for (int64_t c = 0; c < C; c++)
        dot += double(float(dout[c]) * float(weight[c])) * double(float(x[c]) * r);
    const float mean = static_cast<float>(dot / static_cast<double>(C));
    for (int64_t c = 0; c < C; c++) {
        const float past = dresidual ? float(dresidual[n * C + c]) : 0.0f;
        dx[c] = T(r * (float(dout[c]) * float(weight[c]) - float(x[c]) * r * mean) + past);
        if (out) out[n * C + c] = T(float(x[c]) * r * float(weight[c]));
    }
}

template <class T, class G>
__global__ void rmsnorm_backward_naive_kernel_columns(G* dweight, Rows<const T> dout, Rows<const T> x,
                                                      const float* rstd, int64_t N, int64_t C,
                                                      bool accumulate) {
    const int64_t c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (c >= C) return;
    double sum = accumulate ? double(float(dweight[c])) : 0.0;
    for (int64_t n = 0; n < N; n++) sum += double(float(dout.at(n)[c])) * double(float(x.at(n)[c]) * rstd[n]);
    dweight[c] = G(static_cast<float>(sum));
}

template <class T, class G>
void rmsnorm_backward_naive(View<T, 2> dx, View<G, 1> dweight, View<T, 2> out, View<const T, 2> dout,
                            View<const T, 2> x, View<const T, 1> weight, View<const float, 1> rstd,
                            View<const T, 2> dresidual, bool accumulate, LaunchContext context) {
    const int64_t N = x.shape[0], C = x.shape[1];
    // dweight first: dx may take dout's place.
    launch(context.grid(C), rmsnorm_backward_naive_kernel_columns<T, G>, dweight.data, rows(dout), rows(x),
           rstd.data, N, C, accumulate);
    launch(context.grid(N), rmsnorm_backward_naive_kernel<T>, rows(dx), out.data, rows(dout), rows(x),
           weight.data, rstd.data, dresidual.data, N, C);
}

// ---- vectorized: the row in registers

template <class T>
void rmsnorm_forward_vectorized(View<T, 2> out, View<float, 1> rstd, View<const T, 2> x,
                                View<const T, 1> weight, double eps, LaunchContext context) {
    launch_forward<T, false>(nullptr, out, rstd.data, x, nullptr, weight.data, eps, context);
}

// Threads (x: a row's columns, y: rows at a time). A block's rows are blockIdx.x * blockDim.y + threadIdx.y,
// and on by gridDim.x * blockDim.y; partial[gridDim.x, C] gets its sums of dweight. The next rows' loads are
// under way while this one's sum is made: of `slots` - 1 rows to LDS, or with 0 slots of one to registers. Dynamic LDS: that of
// RowsInLds, and no less than C floats where blockDim.y > 1.
template <class T, bool whole, int slots>
__global__ void __launch_bounds__(backward_threads)
    rmsnorm_backward_vectorized_kernel(Dependent<Rows<T>> dx_, Dependent<float*> partial_, Dependent<T*> out_,
                                       Dependent<Rows<const T>> dout_, Dependent<Rows<const T>> x_,
                                       Dependent<const T*> weight_, Dependent<const float*> rstd_,
                                       Dependent<const T*> dresidual_, int64_t N, int C) {
    const auto [dx, partial, out, dout, x, weight, rstd, dresidual] =
        wait(dx_, partial_, out_, dout_, x_, weight_, rstd_, dresidual_);
    constexpr int size = vector_size<T>, vectors = max_backward / size;
    struct Shared {
        float warps[2][max_warps];  // two: a row's sums are read while the next one's are written
    };
    Shared& shared = shared_memory<Shared>();
    const int row_warps = static_cast<int>(blockDim.x) / warp_size;
    const int first_warp = static_cast<int>(threadIdx.y) * row_warps;
    const int64_t step = int64_t{gridDim.x} * blockDim.y;
    int column[vectors];
    uint4 w[vectors], next_x[vectors], next_dout[vectors];
    float dweight[vectors][size] = {};
    const auto load = [N, C](const Rows<const T>& rows, int64_t n, int c) {
        return n < N ? load_part<whole>(rows.at(n), c, C) : make_uint4(0, 0, 0, 0);
    };
    RowsInLds<slots, vectors> in_lds(first_warp + warp_index(), static_cast<int>(blockDim.x * blockDim.y));
    const int first_column = static_cast<int>(threadIdx.x) * size;
    const int apart = static_cast<int>(blockDim.x) * size;
    const auto copy = [&, x = x, dout = dout](int ahead, int64_t n) {
        in_lds.copy(ahead, x.at(n) + first_column, dout.at(n) + first_column, apart,
                    [&](int v) { return n < N && first_column + v * apart < C; });
    };
    int64_t n = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        column[v] = first_column + v * apart;
        w[v] = load_part<whole>(weight, column[v], C);
        if (slots == 0) next_x[v] = load(x, n, column[v]);
        if (slots == 0) next_dout[v] = load(dout, n, column[v]);
    }
    for (int k = 0; k + 1 < slots; k++) copy(k, n + k * step);
    float next_r = n < N ? rstd[n] : 0.0f;
    int buffer = 0;
    for (int64_t first = int64_t{blockIdx.x} * blockDim.y; first < N; first += step, n += step, buffer ^= 1) {
        const float r = next_r;
        uint4 this_x[vectors], this_dout[vectors], past[vectors];
        float dot = 0;
        if constexpr (slots > 0) {
            copy(slots - 1, n + (slots - 1) * step);
            in_lds.read(next_x, next_dout);
        }
#pragma unroll
        for (int v = 0; v < vectors; v++) {
            this_x[v] = next_x[v];
            this_dout[v] = next_dout[v];
            past[v] = dresidual ? load({dresidual, C}, n, column[v]) : make_uint4(0, 0, 0, 0);
            if (slots == 0) next_x[v] = load(x, n + step, column[v]);
            if (slots == 0) next_dout[v] = load(dout, n + step, column[v]);
        }
        next_r = n + step < N ? rstd[n + step] : 0.0f;
#pragma unroll
        for (int v = 0; v < vectors; v++) {
            float a[size], d[size], b[size];
            unpack<T>(this_x[v], a);
            unpack<T>(this_dout[v], d);
            unpack<T>(w[v], b);
            for (int i = 0; i < size; i++) {
                const float xhat = a[i] * r;
                dweight[v][i] += d[i] * xhat;
                dot += d[i] * b[i] * xhat;
                a[i] = xhat * b[i];
            }
            if (out && n < N) store_part<whole>(out + n * C, column[v], C, pack<T>(a));
        }
        dot = warp_sum(dot);
        if (lane_index() == 0) shared.warps[buffer][first_warp + warp_index()] = dot;
        __syncthreads();
        float sum = 0;
        for (int i = 0; i < row_warps; i++) sum += shared.warps[buffer][first_warp + i];
        const float mean = sum / static_cast<float>(C);
        if (n >= N) continue;
#pragma unroll
        for (int v = 0; v < vectors; v++) {
            float a[size], d[size], b[size], p[size];
            unpack<T>(this_x[v], a);
            unpack<T>(this_dout[v], d);
            unpack<T>(w[v], b);
            unpack<T>(past[v], p);
            for (int i = 0; i < size; i++) a[i] = r * (d[i] * b[i] - a[i] * r * mean) + p[i];
            store_part<whole>(dx.at(n), column[v], C, pack<T>(a));
        }
    }
    if constexpr (slots > 0) in_lds.finish();  // the sums take the rows' place
    float* sums = reinterpret_cast<float*>(dynamic_shared_memory());
    for (unsigned y = 0; y < blockDim.y; y++) {
#pragma unroll
        for (int v = 0; v < vectors; v++)
            for (int i = 0; i < size; i++) {
                const int c = column[v] + i;
                if (y != threadIdx.y || c >= C) continue;
                const float sum = dweight[v][i] + (y > 0 ? sums[c] : 0.0f);
                (y + 1 < blockDim.y ? sums[c] : partial[int64_t{blockIdx.x} * C + c]) = sum;
            }
        __syncthreads();
    }
}

template <class G>
__global__ void rmsnorm_backward_vectorized_kernel_columns(Dependent<G*> dweight_,
                                                           Dependent<const float*> partial_, int rows,
                                                           int64_t C, bool accumulate) {
    const auto [dweight, partial] = wait(dweight_, partial_);
    sum_columns(dweight, partial, rows, C, accumulate);
}

int64_t backward_workspace(const Call& c) {
    return backward_shape(c["N"], c["C"], c.launch.threads).blocks * c["C"] * 4;
}

template <class T, class G>
void rmsnorm_backward_vectorized(View<T, 2> dx, View<G, 1> dweight, View<T, 2> out, View<const T, 2> dout,
                                 View<const T, 2> x, View<const T, 1> weight, View<const float, 1> rstd,
                                 View<const T, 2> dresidual, bool accumulate, LaunchContext context) {
    const int64_t N = x.shape[0], C = x.shape[1];
    const BackwardShape shape = backward_shape(N, C, context.threads);
    const bool whole = is_whole({dx.data, out.data, dout.data, x.data, weight.data, dresidual.data},
                                C | dx.stride[0] | dout.stride[0] | x.stride[0], vector_size<T>);
    constexpr int slots = rows_in_lds<T, true>;
    const bool in_lds = whole && !dresidual;  // whose loads keep the memory busy without more rows ahead
    const size_t sums_bytes = shape.threads.y > 1 ? static_cast<size_t>(C) * 4 : 0;
    const size_t rows_bytes = in_lds ? size_t{RowsInLds<slots, max_backward / vector_size<T>>::bytes} *
                                           shape.threads.x * shape.threads.y
                                     : 0;
    float* partial = static_cast<float*>(context.workspace);
    launch(Grid(shape.blocks, shape.threads, context.stream, std::max(sums_bytes, rows_bytes)),
           in_lds  ? rmsnorm_backward_vectorized_kernel<T, true, slots>
           : whole ? rmsnorm_backward_vectorized_kernel<T, true, 0>
                   : rmsnorm_backward_vectorized_kernel<T, false, 0>,
           rows(dx), partial, out.data, rows(dout), rows(x), weight.data, rstd.data, dresidual.data, N,
           static_cast<int>(C));
    launch(columns_grid(C, context.stream), rmsnorm_backward_vectorized_kernel_columns<G>, dweight.data,
           partial, shape.blocks, C, accumulate);
}

Operation rmsnorm_forward(
    "rmsnorm_forward<T: f32 bf16 fp16 f64, A: arithmetic(T)>"
    "(out: T[N,C] strided may_share(x), rstd: A[N]; x: T[N,C] strided, weight: T[C]; eps: float {1e-5, 1e-6})"
    " rows(N) empty(N) test(N=3, C=2048) test(N=2, C=8192) test(N=2, C=16384)"
    " derivative rmsnorm_backward(dx: grad x, dweight: grad weight; dout: grad out, x, weight, rstd)",
    "out = x / rms(x) * weight",
    {{"cpu", "rows over threads, vector lanes over columns",
      instantiations<LLAMAC_FLOATS(rmsnorm_forward_cpu)>()},
     {"vectorized", "one block per row, which stays in registers, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(rmsnorm_forward_vectorized)>(), forward_fits, row_block_sizes},
     {"naive", "one thread per row", instantiations<LLAMAC_KERNELS(rmsnorm_forward_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(rmsnorm_forward_reference), rmsnorm_forward_reference<double>>()}},
    [](const Call& c) { return 4.0 * c["N"] * c["C"]; });

Operation rmsnorm_backward(
    "rmsnorm_backward<T: f32 bf16 fp16 f64, A: arithmetic(T), G: f32 bf16 f64>"
    "(dx: T[N,C] strided may_share(dresidual, dout), dweight: G[C] adds_if(accumulate), out?: T[N,C];"
    " dout: T[N,C] strided, x: T[N,C] strided, weight: T[C], rstd: A[N], dresidual?: T[N,C]; accumulate: "
    "bool)"
    " rows(N) empty(N) test(N=9, C=4096) test(N=301, C=64) test(N=302, C=64)",
    "gradients of rmsnorm_forward, and of residual_rmsnorm_forward with the sum as x",
    {{"cpu", "rows over threads; dweight by blocks of rows",
      instantiations<LLAMAC_FLOATS(rmsnorm_backward_cpu, float), rmsnorm_backward_cpu<bf16, bf16>>()},
     {"vectorized", "rows in registers, 128-bit accesses, dweight as one partial row per block",
      instantiations<LLAMAC_KERNELS(rmsnorm_backward_vectorized, float),
                     rmsnorm_backward_vectorized<bf16, bf16>>(),
      backward_fits, backward_block_sizes, backward_workspace},
     {"naive", "one thread per row, one thread per column for dweight",
      instantiations<LLAMAC_KERNELS(rmsnorm_backward_naive, float), rmsnorm_backward_naive<bf16, bf16>>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(rmsnorm_backward_reference, float), rmsnorm_backward_reference<bf16, bf16>,
                     rmsnorm_backward_reference<double, double>>()}},
    [](const Call& c) { return 10.0 * c["N"] * c["C"]; });

}  // namespace
}  // namespace llamac
