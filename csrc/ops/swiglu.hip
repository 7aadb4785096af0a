// SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020). A row of gate_up is [gate | up], F columns each, as one matmul
// writes it.
//
//   out = silu(gate) * up,   silu(g) = g * s,   s = 1 / (1 + e^-g)
//   dgate = dout * up * s * (1 + g (1 - s)),   dup = dout * silu(gate)
//
// dgate_up may be gate_up's memory, and out dout's: an element is read before its gradients are written. In the backward, out is
// optional: it recomputes the forward output, the same bits.
//
// reference:  plain loops.
// cpu:        rows over threads, vector lanes over columns, fast_exp.
// naive:      one thread per element.
// vectorized: 128-bit accesses: a thread has one vector of columns in two rows, with all loads in flight before the first is
//             used.
//
// swiglu.h has the functions that swiglu_quantize.hip shares. Measured: docs/benchmarks/nvidia-h200.md.
#include "ops/swiglu.h"

#include <algorithm>
#include <vector>

#include "core/operation.h"
#include "ops/row_tiles.h"

namespace llamac {
namespace {

template <class T>
void swiglu_forward_cpu(View<T, 2> out, View<const T, 2> gate_up) {
    const int64_t N = out.shape[0], F = out.shape[1];
#pragma omp parallel for if (N > 1)
    for (int64_t n = 0; n < N; n++) swiglu_row(&out(n, 0), &gate_up(n, 0), F);
}

template <class T>
void swiglu_backward_cpu(View<T, 2> dgate_up, View<T, 2> out, View<const T, 2> dout,
                         View<const T, 2> gate_up) {
    const int64_t N = dout.shape[0], F = dout.shape[1];
#pragma omp parallel
    {
        std::vector<T> again(out ? static_cast<size_t>(F) : 0);  // until dout, where out may lie, was read
#pragma omp for
        for (int64_t n = 0; n < N; n++) {
            if (out) swiglu_row(again.data(), &gate_up(n, 0), F);
            swiglu_backward_row(&dgate_up(n, 0), &dout(n, 0), &gate_up(n, 0), F);
            if (out) std::copy(again.begin(), again.end(), &out(n, 0));
        }
    }
}

// ---- naive

template <class T>
__global__ void swiglu_forward_naive_kernel(T* out, const T* gate_up, int64_t N, int64_t F) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= N * F) return;
    const int64_t n = i / F, f = i % F;
    const float g = float(gate_up[n * 2 * F + f]), up = float(gate_up[n * 2 * F + F + f]);
    out[i] = swiglu_naive<T>(g, up);
}

template <class T>
void swiglu_forward_naive(View<T, 2> out, View<const T, 2> gate_up, LaunchContext context) {
    const int64_t N = out.shape[0], F = out.shape[1];
    launch(context.grid(N * F), swiglu_forward_naive_kernel<T>, out.data, gate_up.data, N, F);
}

template <class T>
__global__ void swiglu_backward_naive_kernel(T* dgate_up, T* out, const T* dout, const T* gate_up, int64_t N,
                                             int64_t F) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= N * F) return;
    const int64_t n = i / F, gate = n * 2 * F + i % F, up = gate + F;
    const float g = float(gate_up[gate]), u = float(gate_up[up]), d = float(dout[i]);
    swiglu_backward_naive_element(dgate_up + gate, dgate_up + up, d, g, u);
    if (out) out[i] = swiglu_naive<T>(g, u);
}

template <class T>
void swiglu_backward_naive(View<T, 2> dgate_up, View<T, 2> out, View<const T, 2> dout,
                           View<const T, 2> gate_up, LaunchContext context) {
    const int64_t N = dout.shape[0], F = dout.shape[1];
    launch(context.grid(N * F), swiglu_backward_naive_kernel<T>, dgate_up.data, out.data, dout.data,
           gate_up.data, N, F);
}

// ---- vectorized: 128-bit accesses

// At most. Two such blocks a multiprocessor are asked of the compiler (on AMD the number means waves a SIMD), not
// more: that leaves it registers for all loads of a thread at once.
constexpr int block_threads = 512;
// One where accesses are narrow: those of two would be more than registers.
template <bool whole>
constexpr int rows_per_thread = whole ? 2 : 1;

template <class T, bool whole>
__global__ void __launch_bounds__(block_threads, 2)
    swiglu_forward_vectorized_kernel(Dependent<T*> out_, Dependent<const T*> gate_up_, int64_t N, int64_t F,
                                     unsigned across) {
    const auto [out, gate_up] = start_next_and_wait(out_, gate_up_);
    constexpr int size = vector_size<T>, rows = rows_per_thread<whole>;
    const int64_t f = (int64_t{blockIdx.x % across} * blockDim.x + threadIdx.x) * size;
    const int64_t first = int64_t{blockIdx.x / across} * (rows * blockDim.y) + threadIdx.y;
    if (f >= F) return;
    uint4 gates[rows], ups[rows];
#pragma unroll
    for (int r = 0; r < rows; r++) {
        const int64_t n = first + r * blockDim.y, end = n < N ? F : 0;
        gates[r] = load_part<whole>(gate_up + n * 2 * F, f, end);
        ups[r] = load_part<whole>(gate_up + n * 2 * F + F, f, end);
    }
#pragma unroll
    for (int r = 0; r < rows; r++) {
        const int64_t n = first + r * blockDim.y, end = n < N ? F : 0;
        float g[size], u[size];
        unpack<T>(gates[r], g);
        unpack<T>(ups[r], u);
        swiglu_vector<T>(g, u);
        store_part<whole>(out + n * F, f, end, pack<T>(g));
    }
}

template <class T, bool whole>
__global__ void __launch_bounds__(block_threads, 2)
    swiglu_backward_vectorized_kernel(Dependent<T*> dgate_up_, Dependent<T*> out_, Dependent<const T*> dout_,
                                      Dependent<const T*> gate_up_, int64_t N, int64_t F, unsigned across) {
    const auto [dgate_up, out, dout, gate_up] = wait(dgate_up_, out_, dout_, gate_up_);
    constexpr int size = vector_size<T>, rows = rows_per_thread<whole>;
    const int64_t f = (int64_t{blockIdx.x % across} * blockDim.x + threadIdx.x) * size;
    const int64_t first = int64_t{blockIdx.x / across} * (rows * blockDim.y) + threadIdx.y;
    if (f >= F) return;
    uint4 gates[rows], ups[rows], douts[rows];
#pragma unroll
    for (int r = 0; r < rows; r++) {
        const int64_t n = first + r * blockDim.y, end = n < N ? F : 0;
        gates[r] = load_part<whole>(gate_up + n * 2 * F, f, end);
        ups[r] = load_part<whole>(gate_up + n * 2 * F + F, f, end);
        douts[r] = load_part<whole>(dout + n * F, f, end);
    }
#pragma unroll
    for (int r = 0; r < rows; r++) {
        const int64_t n = first + r * blockDim.y, end = n < N ? F : 0;
        float g[size], u[size], d[size];
        unpack<T>(gates[r], g);
        unpack<T>(ups[r], u);
        unpack<T>(douts[r], d);
        swiglu_backward_vector<T>(g, u, d);
        store_part<whole>(dgate_up + n * 2 * F, f, end, pack<T>(g));
        store_part<whole>(dgate_up + n * 2 * F + F, f, end, pack<T>(d));
        if (out) store_part<whole>(out + n * F, f, end, pack<T>(u));
    }
}

template <class T>
void swiglu_forward_vectorized(View<T, 2> out, View<const T, 2> gate_up, LaunchContext context) {
    const int64_t N = out.shape[0], F = out.shape[1];
    const bool whole = is_whole({out.data, gate_up.data}, F, vector_size<T>);
    const int rows = whole ? rows_per_thread<true> : rows_per_thread<false>;
    const RowTiles t = row_tiles(N, F, vector_size<T>, rows, context.threads);
    launch(Grid(t.blocks, t.threads, context.stream),
           whole ? swiglu_forward_vectorized_kernel<T, true> : swiglu_forward_vectorized_kernel<T, false>,
           out.data, gate_up.data, N, F, t.across);
}

template <class T>
void swiglu_backward_vectorized(View<T, 2> dgate_up, View<T, 2> out, View<const T, 2> dout,
                                View<const T, 2> gate_up, LaunchContext context) {
    const int64_t N = dout.shape[0], F = dout.shape[1];
    const bool whole = is_whole({dgate_up.data, out.data, dout.data, gate_up.data}, F, vector_size<T>);
    const int rows = whole ? rows_per_thread<true> : rows_per_thread<false>;
    const RowTiles t = row_tiles(N, F, vector_size<T>, rows, context.threads);
    launch(Grid(t.blocks, t.threads, context.stream),
           whole ? swiglu_backward_vectorized_kernel<T, true> : swiglu_backward_vectorized_kernel<T, false>,
           dgate_up.data, out.data, dout.data, gate_up.data, N, F, t.across);
}

constexpr BlockSizes block_sizes = blocks_of(256, 128, block_threads);

Operation swiglu_forward(
    "swiglu_forward<T: f32 bf16 fp16 f64>"
    "(out: T[N,F]; gate_up: T[N,2F]) rows(N) empty(N)"
    " derivative swiglu_backward(dgate_up: grad gate_up; dout: grad out, gate_up)",
    "out = silu(gate) * up",
    {{"cpu", "rows over threads, vector lanes over columns",
      instantiations<LLAMAC_FLOATS(swiglu_forward_cpu)>()},
     {"vectorized", "the loads of two rows per thread in flight, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(swiglu_forward_vectorized)>(), nullptr, block_sizes},
     {"naive", "one thread per element", instantiations<LLAMAC_KERNELS(swiglu_forward_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(swiglu_forward_reference), swiglu_forward_reference<double>>()}},
    [](const Call& c) { return 5.0 * c["N"] * c["F"]; });

Operation swiglu_backward(
    "swiglu_backward<T: f32 bf16 fp16 f64>"
    "(dgate_up: T[N,2F] may_share(gate_up), out?: T[N,F] may_share(dout);"
    " dout: T[N,F], gate_up: T[N,2F]) rows(N) empty(N)",
    "gradients of swiglu_forward, and its result again",
    {{"cpu", "rows over threads, vector lanes over columns",
      instantiations<LLAMAC_FLOATS(swiglu_backward_cpu)>()},
     {"vectorized", "the loads of two rows per thread in flight, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(swiglu_backward_vectorized)>(), nullptr, block_sizes},
     {"naive", "one thread per element", instantiations<LLAMAC_KERNELS(swiglu_backward_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(swiglu_backward_reference), swiglu_backward_reference<double>>()}},
    [](const Call& c) { return 12.0 * c["N"] * c["F"]; });

}  // namespace
}  // namespace llamac
