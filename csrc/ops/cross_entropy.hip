// Cross-entropy of a softmax over the vocabulary, fused with its gradient.
//
//   losses[n]    = log(sum_v e^logits[n,v]) - logits[n,targets[n]]
//   dlogits[n,v] = dloss * dlosses[n] * (e^logits[n,v] / sum - [v = targets[n]])
//
// Rows whose target is ignore_index have loss 0 and gradient 0. dlogits may be logits' memory, so that the model's largest
// activation exists once; null: losses only. dlosses null: ones. The exponents are logits - max, which cannot overflow, and the
// target's logit is subtracted from max before log(sum) is added: exact near the maximum. mean and num_valid (optional) are
// those of mean_loss.hip, by one more launch of its kernel in the same call. targets may have any stride: PyTorch's are int64,
// whose lower halves are the int32. So may dlosses: a mean's gradient is one number for all rows.
//
// reference:  plain loops. The sum is double for all types: a serial float sum over a vocabulary of 128,256 loses more than
//             PyTorch's, which adds in vector lanes.
// cpu:        rows over threads; a row (16 KB at V = 4,096 in f32) stays in cache for its passes: maximum, sum, gradient.
// naive:      one thread per row, three passes.
// vectorized: one block per row, 128-bit accesses: maximum and sum in one pass (Milakov and Gimelshein, "Online normalizer
//             calculation for softmax", 2018), gradient in a second one, which finds part of the row in the caches.
// on_chip:    as vectorized, but the row stays on the chip, in registers and LDS: memory is read once.
//
// Measured: docs/benchmarks/nvidia-h200.md.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "core/device.h"
#include "core/operation.h"
#include "core/simd.h"
#include "ops/mean_loss.h"

namespace llamac {
namespace {

template <class T>
void cross_entropy_reference(View<arithmetic<T>, 1> losses, View<T, 2> dlogits, View<arithmetic<T>, 0> mean,
                             View<arithmetic<T>, 0> num_valid, View<const T, 2> logits,
                             View<const int32_t, 1> targets, View<const arithmetic<T>, 1> dlosses,
                             double dloss, int64_t ignore_index) {
    using A = arithmetic<T>;
    const int64_t N = logits.shape[0], V = logits.shape[1];
    for (int64_t n = 0; n < N; n++) {
        const int64_t target = targets(n);
        if (target == ignore_index) {
            losses(n) = 0;
            for (int64_t v = 0; dlogits && v < V; v++) dlogits(n, v) = T(0);
            continue;
        }
        A largest = A(logits(n, 0));
        for (int64_t v = 1; v < V; v++) largest = std::max(largest, A(logits(n, v)));
        double sum = 0;
        for (int64_t v = 0; v < V; v++) sum += std::exp(A(logits(n, v)) - largest);
        losses(n) = A(std::log(sum) + (double(largest) - double(logits(n, target))));
        const A factor = A(dloss) * (dlosses ? dlosses(n) : A(1));
        for (int64_t v = 0; dlogits && v < V; v++) {
            const A probability = std::exp(A(logits(n, v)) - largest) / A(sum);
            dlogits(n, v) = T(factor * (probability - (v == target ? A(1) : A(0))));
        }
    }
    if (mean || num_valid) mean_loss_reference<A>(mean, num_valid, losses, targets, ignore_index);
}

// One row; dx may be x, or null.
template <class T>
float cross_entropy_row(T* dx, const T* x, int64_t target, int64_t V, float factor) {
    float largest = float(x[0]);
#pragma omp simd reduction(max : largest)
    for (int64_t v = 0; v < V; v++) largest = std::max(largest, float(x[v]));
    const double sum = block_sum(V, [=](int64_t v) { return fast_exp(float(x[v]) - largest); });
    const float at_target = float(x[target]);
    if (dx) {
        const float scale = static_cast<float>(factor / sum);
#pragma omp simd
        for (int64_t v = 0; v < V; v++) store(dx + v, fast_exp(float(x[v]) - largest) * scale);
        dx[target] = T(factor * (static_cast<float>(fast_exp(at_target - largest) / sum) - 1.0f));
    }
    return static_cast<float>(std::log(sum) + (double(largest) - double(at_target)));
}

template <class T>
void cross_entropy_cpu(View<float, 1> losses, View<T, 2> dlogits, View<float, 0> mean,
                       View<float, 0> num_valid, View<const T, 2> logits, View<const int32_t, 1> targets,
                       View<const float, 1> dlosses, double dloss, int64_t ignore_index) {
    const int64_t N = logits.shape[0], V = logits.shape[1];
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        T* dx = dlogits ? &dlogits(n, 0) : nullptr;
        const float factor = static_cast<float>(dloss) * (dlosses ? dlosses(n) : 1.0f);
        if (targets(n) == ignore_index) {
            losses(n) = 0;
            if (dx) std::fill(dx, dx + V, T(0));
        } else {
            losses(n) = cross_entropy_row(dx, &logits(n, 0), targets(n), V, factor);
        }
    }
    if (mean || num_valid) mean_loss_cpu(mean, num_valid, losses, targets, ignore_index);
}

// ---- naive

template <class T>
__global__ void cross_entropy_naive_kernel(float* losses, View<T, 2> dlogits, View<const T, 2> logits,
                                           View<const int32_t, 1> targets, View<const float, 1> dlosses,
                                           int64_t N, int64_t V, float dloss, int64_t ignore_index) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const T* x = &logits(n, 0);
    const int64_t target = targets(n);
    if (target == ignore_index) {
        losses[n] = 0;
        for (int64_t v = 0; dlogits && v < V; v++) dlogits(n, v) = T(0.0f);
        return;
    }
    float largest = float(x[0]);
    for (int64_t v = 1; v < V; v++) largest = fmaxf(largest, float(x[v]));
    double sum = 0;
    for (int64_t v = 0; v < V; v++) sum += double(expf(float(x[v]) - largest));
    losses[n] = static_cast<float>(log(sum)) + (largest - float(x[target]));
    const float factor = dlosses ? dloss * dlosses(n) : dloss;
    for (int64_t v = 0; dlogits && v < V; v++) {
        const float probability = expf(float(x[v]) - largest) / static_cast<float>(sum);
        dlogits(n, v) = T(factor * (probability - (v == target ? 1.0f : 0.0f)));
    }
}

template <class T>
void cross_entropy_naive(View<float, 1> losses, View<T, 2> dlogits, View<float, 0> mean,
                         View<float, 0> num_valid, View<const T, 2> logits, View<const int32_t, 1> targets,
                         View<const float, 1> dlosses, double dloss, int64_t ignore_index,
                         LaunchContext context) {
    const int64_t N = logits.shape[0], V = logits.shape[1];
    launch(context.grid(N), cross_entropy_naive_kernel<T>, losses.data, dlogits, logits, targets, dlosses, N,
           V, dloss, ignore_index);
    if (mean || num_valid) mean_loss_naive(mean, num_valid, losses, targets, ignore_index, context);
}

// ---- shared by vectorized and on_chip

// A row as vectors from its first 16-byte border on, so that rows of any length move by 128 bits. The elements
// before and behind them, less than two vectors, are the edge: one per thread.
struct RowShape {
    int head, vectors;
    int64_t edge;  // of this thread; V or more where it has none
};
template <class T>
__device__ RowShape row_shape(const T* row, int64_t V) {
    constexpr int size = vector_size<T>;
    const int64_t past = reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T);
    const int64_t head = past ? (size - past < V ? size - past : V) : 0;
    const int64_t vectors = (V - head) / size, t = threadIdx.x;
    return {static_cast<int>(head), static_cast<int>(vectors), t < head ? t : t + vectors * size};
}

// Vector j from x on. The offset is of 32 unsigned bits: beside a base that is the same for all lanes it
// costs one register, an address two.
template <class T>
__device__ T* vector_at(T* x, int j) {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return reinterpret_cast<T*>(reinterpret_cast<Byte*>(x) + static_cast<uint32_t>(j) * 16u);
}

// Vector j of the row's vectors from x on; past the end, the last again: a branch a load would cost more.
// Its values are masked where they are used, so that nothing waits for the load before.
template <bool streaming, class T>
__device__ uint4 load_logits(const T* x, int j, int vectors) {
    const T* p = vector_at(x, j < vectors ? j : vectors - 1);
    return streaming ? load128_streaming(p) : load128(p);
}
// 32 bits of -infinity, which adds nothing to a softmax, in the place of a vector past the end.
template <class T>
struct MinusInfinity;
template <>
struct MinusInfinity<float> {
    static constexpr uint32_t bits = 0xff800000u;
};
template <>
struct MinusInfinity<bf16> {
    static constexpr uint32_t bits = 0xff80ff80u;
};
template <>
struct MinusInfinity<fp16> {
    static constexpr uint32_t bits = 0xfc00fc00u;
};
template <class T>
__device__ uint4 masked(uint4 bits, int j, int vectors) {
    constexpr uint32_t none = MinusInfinity<T>::bits;
    return j < vectors ? bits : make_uint4(none, none, none, none);
}

// Narrow results have 11 bits or fewer: the quick exponential loses nothing.
template <class T>
__device__ float exponential(float x) {
    if constexpr (narrow<T>)
        return fast_exp2(x * 1.44269504f);
    else
        return expf(x);
}

// sum of e^(x - largest) over a part of a row. largest begins finite: a part of nothing but -infinity has sum 0, not NaN.
struct Softmax {
    float largest = -FLT_MAX, sum = 0;
};
template <class T>
__device__ void add(Softmax& s, uint4 bits) {
    float x[vector_size<T>];
    unpack<T>(bits, x);
    float largest = s.largest;
    for (const float value : x) largest = fmaxf(largest, value);
    s.sum *= exponential<T>(s.largest - largest);
    for (const float value : x) s.sum += exponential<T>(value - largest);
    s.largest = largest;
}
template <class T>
__device__ void add_one(Softmax& s, float x) {
    const float largest = fmaxf(s.largest, x);
    s = {largest, s.sum * exponential<T>(s.largest - largest) + exponential<T>(x - largest)};
}

struct SoftmaxShared {
    float maxima[max_warps], sums[max_warps];
};
template <class T>
__device__ Softmax block_softmax(Softmax own, SoftmaxShared& shared) {
    const float largest = block_max(own.largest, shared.maxima);
    return {largest, block_sum(own.sum * exponential<T>(own.largest - largest), shared.sums)};
}

// The gradient but for the target's -1.
template <class T>
__device__ uint4 gradient(uint4 bits, float largest, float scale) {
    float x[vector_size<T>];
    unpack<T>(bits, x);
    for (float& value : x) value = exponential<T>(value - largest) * scale;
    return pack<T>(x);
}

// The end of a row, behind a barrier: its loss, and the target's gradient over that of the loop.
template <class T>
__device__ void finish_row(float* loss, T* dx, int target, float at_target, Softmax s, float factor) {
    if (threadIdx.x != 0) return;
    const float below = at_target - s.largest;
    *loss = logf(s.sum) - below;
    if (dx) dx[target] = T(factor * (exponential<T>(below) / s.sum - 1.0f));
}

template <class T>
__device__ void ignore_row(float* loss, T* dx, int64_t V) {
    if (threadIdx.x == 0) *loss = 0;
    if (!dx) return;
    const RowShape shape = row_shape(dx, V);
    for (int j = threadIdx.x; j < shape.vectors; j += blockDim.x)
        store128_streaming(vector_at(dx + shape.head, j), make_uint4(0, 0, 0, 0));
    if (shape.edge < V) dx[shape.edge] = T(0.0f);
}

// Rows of logits and dlogits have their borders at the same elements, and at least one whole vector.
constexpr Constraints rows_have_vectors{
    "rows of at least 32 bytes, logits and dlogits with the same stride and aligned to 16 alike",
    [](const Call& c) {
        const Tensor &logits = c.operand("logits"), &dlogits = c.operand("dlogits");
        const auto past = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16; };
        const bool agree =
            !dlogits.data || (past(dlogits) == past(logits) && dlogits.stride[0] == logits.stride[0]);
        return agree && c["V"] * size_of(logits.dtype) >= 2 * 16;
    }};

// ---- vectorized: one pass for maximum and sum, one for the gradient

template <class T>
__global__ void __launch_bounds__(max_threads_per_block)
    cross_entropy_vectorized_kernel(Dependent<float*> losses_, Dependent<T*> dlogits_,
                                    Dependent<const T*> logits_, Dependent<View<const int32_t, 1>> targets_,
                                    Dependent<View<const float, 1>> dlosses_, int64_t V, int64_t stride,
                                    float dloss, int64_t ignore_index) {
    const auto [losses, dlogits, logits, targets, dlosses] =
        wait(losses_, dlogits_, logits_, targets_, dlosses_);
    constexpr int at_once = 4;
    SoftmaxShared& shared = shared_memory<SoftmaxShared>();
    const int64_t n = blockIdx.x;
    const T* row = logits + n * stride;
    T* drow = dlogits ? dlogits + n * stride : nullptr;
    const int target = targets(n), thread = threadIdx.x, step = at_once * blockDim.x;
    if (target == ignore_index) return ignore_row(losses + n, drow, V);
    const float at_target = float(row[target]);  // before it is overwritten
    const RowShape shape = row_shape(row, V);
    const T* x = row + shape.head;
    const float edge = shape.edge < V ? float(row[shape.edge]) : -INFINITY;

    Softmax own;
    for (int first = 0; first < shape.vectors; first += step) {
        uint4 bits[at_once] = {};
#pragma unroll
        for (int v = 0; v < at_once; v++)
            bits[v] = load_logits<false>(x, first + v * blockDim.x + thread, shape.vectors);
#pragma unroll
        for (int v = 0; v < at_once; v++)
            add<T>(own, masked<T>(bits[v], first + v * blockDim.x + thread, shape.vectors));
    }
    add_one<T>(own, edge);
    const Softmax all = block_softmax<T>(own, shared);
    const float factor = dlosses ? dloss * dlosses(n) : dloss;
    if (drow) {
        const float scale = factor / all.sum;
        T* dx = drow + shape.head;
        // Backwards: the last reads are still in the caches.
        for (int first = (shape.vectors - 1) / step * step; first >= 0; first -= step) {
            uint4 bits[at_once] = {};
#pragma unroll
            for (int v = 0; v < at_once; v++) {
                const int j = first + v * blockDim.x + thread;
                // Nothing past the end: another thread may be writing there already.
                if (j < shape.vectors) bits[v] = load128_streaming(vector_at(x, j));
            }
#pragma unroll
            for (int v = 0; v < at_once; v++) {
                const int j = first + v * blockDim.x + thread;
                if (j < shape.vectors)
                    store128_streaming(vector_at(dx, j), gradient<T>(bits[v], all.largest, scale));
            }
        }
        if (shape.edge < V) drow[shape.edge] = T(exponential<T>(edge - all.largest) * scale);
    }
    __syncthreads();
    finish_row(losses + n, drow, target, at_target, all, factor);
}

template <class T>
void cross_entropy_vectorized(View<float, 1> losses, View<T, 2> dlogits, View<float, 0> mean,
                              View<float, 0> num_valid, View<const T, 2> logits,
                              View<const int32_t, 1> targets, View<const float, 1> dlosses, double dloss,
                              int64_t ignore_index, LaunchContext context) {
    const int64_t N = logits.shape[0], V = logits.shape[1];
    launch(Grid(blocks_for(N, 1), context.threads, context.stream), cross_entropy_vectorized_kernel<T>,
           losses.data, dlogits.data, logits.data, targets, dlosses, V, logits.stride[0], dloss,
           ignore_index);
    if (mean || num_valid) mean_loss_one_block(mean, num_valid, losses, targets, ignore_index, context);
}

// ---- on_chip: the row on the chip

// A tile of 8 vectors is the widest whose vectors LDS may replace: on gfx942 such a vector takes its registers twice.
// Where a thread has 128 registers, a tile of 13 that stays, with 3 vectors in LDS beside it, holds 131,072 bf16 on MI300X,
// Llama 3's 128,256 among them; 8 and 3 hold 90,112. gfx942: 127 VGPRs in bf16, 115 in f32, no scratch, no spills, 48 KiB
// of LDS, 4 waves a SIMD: one block of 1,024.
constexpr int usual_tile = 8, wide_tile = 13, beside_wide_tile = 3;
constexpr bool has_wide_tile = registers_in_full_block >= 128;

// How a row is resident on the chip: of each thread `in_registers` vectors, its register tile, and `in_lds` more.
struct Residency {
    int in_registers, in_lds, threads;
    bool fits;
};
Residency residency_of(int64_t V, int size, int wanted) {
    const DeviceProperties& d = device_properties();
    const int64_t vectors = V / size;
    const auto room = [&](int64_t threads) {
        const int64_t lds = d.shared_bytes - static_cast<int64_t>(sizeof(SoftmaxShared));
        return std::min<int64_t>(usual_tile, lds / (threads * 16));
    };
    const auto needed = [&](int64_t threads) { return (vectors + threads - 1) / threads; };
    const auto capacity = [&](int64_t threads) {
        const bool wide = has_wide_tile && room(threads) >= beside_wide_tile;
        return std::max(usual_tile + room(threads), wide ? int64_t{wide_tile + beside_wide_tile} : 0);
    };
    const auto whole_warps = [&](int64_t threads) {
        return std::min<int64_t>(max_threads_per_block,
                                 (threads + d.warp_size - 1) / d.warp_size * d.warp_size);
    };
    int64_t threads = whole_warps(std::min<int64_t>(wanted, vectors));
    while (threads < max_threads_per_block && needed(threads) > capacity(threads))
        threads = whole_warps(threads + 1);
    int64_t in_registers = 2;
    while (in_registers < usual_tile &&
           in_registers + std::min(in_registers, room(threads)) < needed(threads))
        in_registers *= 2;
    int64_t in_lds = std::max<int64_t>(0, needed(threads) - in_registers);
    if (has_wide_tile && in_lds > room(threads)) in_registers = wide_tile, in_lds = beside_wide_tile;
    return {static_cast<int>(in_registers), static_cast<int>(in_lds), static_cast<int>(threads),
            needed(threads) <= capacity(threads)};
}

// A block takes every gridDim.x-th row. The register tile of a thread, `in_registers` vectors, is filled or in
// flight. The first `in_lds` of them move to LDS as soon as their sum is taken, and their registers get
// the row's next vectors; a register whose gradient is written gets the next row's. So loads are in flight
// while the exponentials are computed, and the block never waits for a whole row. The wide tile's vectors stay;
// those that LDS gets are the row's last, and are loaded while the tile's sum is taken.
template <class T, int in_registers>
__global__ void __launch_bounds__(max_threads_per_block)
    cross_entropy_on_chip_kernel(Dependent<float*> losses_, Dependent<T*> dlogits_,
                                 Dependent<const T*> logits_, Dependent<View<const int32_t, 1>> targets_,
                                 Dependent<View<const float, 1>> dlosses_, int64_t N, int64_t V,
                                 int64_t stride, float dloss, int64_t ignore_index, int in_lds) {
    const auto [losses, dlogits, logits, targets, dlosses] =
        wait(losses_, dlogits_, logits_, targets_, dlosses_);
    SoftmaxShared& shared = shared_memory<SoftmaxShared>();
    const int thread = threadIdx.x, step = blockDim.x;
    uint4* lds = reinterpret_cast<uint4*>(dynamic_shared_memory()) + thread;  // read by this thread alone
    constexpr int beside = in_registers == wide_tile ? beside_wide_tile : 0;
    uint4 tile[in_registers];
    const T* x = logits + blockIdx.x * stride;  // the row whose vectors are loaded
    RowShape shape = row_shape(x, V);
    x += shape.head;
#pragma unroll
    for (int v = 0; v < in_registers; v++) tile[v] = load_logits<true>(x, v * step + thread, shape.vectors);
    for (int64_t n = blockIdx.x; n < N; n += gridDim.x) {
        const T* row = logits + n * stride;
        T* drow = dlogits ? dlogits + n * stride : nullptr;
        const float edge = shape.edge < V ? float(row[shape.edge]) : -INFINITY;
        const int target = targets(n);
        const bool ignored = target == ignore_index;
        const float at_target = ignored ? 0.0f : float(row[target]);  // before it is overwritten

        [[maybe_unused]] uint4 to_lds[beside_wide_tile];
        if constexpr (beside > 0)
#pragma unroll
            for (int v = 0; v < beside; v++)
                to_lds[v] = load_logits<true>(x, (in_registers + v) * step + thread, shape.vectors);

        Softmax own;
        // Optimization barriers: a register for each vector's place, and for each comparison, would be too many.
        int j = thread;
        in_lds = optimization_barrier_uniform(in_lds);
#pragma unroll
        for (int v = 0; v < in_registers; v++, j = optimization_barrier(j + step)) {
            add<T>(own, masked<T>(tile[v], j, shape.vectors));
            if (!beside && v < in_lds) {
                lds[j - thread] = tile[v];
                tile[v] = load_logits<true>(x, j + in_registers * step, shape.vectors);
                scheduling_barrier();
            }
            // One sum after the other: to begin several at once takes more registers than are left.
            if (beside) own.sum = __uint_as_float(optimization_barrier(__float_as_uint(own.sum)));
        }
        add_one<T>(own, edge);
        j = in_registers * step + thread;
#pragma unroll
        for (int v = 0; v < in_registers; v++, j = optimization_barrier(j + step))
            if (!beside && v < in_lds) add<T>(own, masked<T>(tile[v], j, shape.vectors));
        if constexpr (beside > 0)
#pragma unroll
            for (int v = 0; v < beside; v++) {
                add<T>(own, masked<T>(to_lds[v], (in_registers + v) * step + thread, shape.vectors));
                lds[v * step] = to_lds[v];
            }
        const Softmax all = block_softmax<T>(own, shared);
        const float factor = dlosses ? dloss * dlosses(n) : dloss, scale = factor / all.sum;
        T* dx = drow + shape.head;
        const int vectors = shape.vectors;
        const int64_t edge_at = shape.edge;
        const auto write = [=](int at, uint4 bits) {
            if (drow && at < vectors)
                store128_streaming(vector_at(dx, at),
                                   ignored ? make_uint4(0, 0, 0, 0) : gradient<T>(bits, all.largest, scale));
        };
        for (int v = 0; v < in_lds; v++)
            write((beside ? in_registers + v : v) * step + thread, lds[v * step]);
        const bool more = n + gridDim.x < N;  // no loads after the last row: this one is being written
        x = logits + (more ? n + gridDim.x : n) * stride;
        shape = row_shape(x, V);
        x += shape.head;
        j = thread;
        in_lds = optimization_barrier_uniform(in_lds);
#pragma unroll
        for (int v = 0; v < in_registers; v++, j = optimization_barrier(j + step)) {
            write(!beside && v < in_lds ? j + in_registers * step : j, tile[v]);
            if (more) tile[v] = load_logits<true>(x, j, shape.vectors);
            scheduling_barrier();
        }
        if (drow && edge_at < V)
            drow[edge_at] = T(ignored ? 0.0f : exponential<T>(edge - all.largest) * scale);
        __syncthreads();  // the row is written, and the shared sums are free for the next
        if (!ignored)
            finish_row(losses + n, drow, target, at_target, all, factor);
        else if (thread == 0)
            losses[n] = 0;
    }
}

constexpr Constraints row_fits{
    "rows of at least 32 bytes that fit in a block's registers and LDS, logits and dlogits alike aligned to "
    "16",
    [](const Call& c) {
        const int size = static_cast<int>(16 / size_of(c.operand("logits").dtype));
        return rows_have_vectors(c) && residency_of(c["V"], size, max_threads_per_block).fits;
    }};

template <class T>
void cross_entropy_on_chip(View<float, 1> losses, View<T, 2> dlogits, View<float, 0> mean,
                           View<float, 0> num_valid, View<const T, 2> logits, View<const int32_t, 1> targets,
                           View<const float, 1> dlosses, double dloss, int64_t ignore_index,
                           LaunchContext context) {
    const int64_t N = logits.shape[0], V = logits.shape[1];
    const Residency row = residency_of(V, vector_size<T>, context.threads);
    auto kernel = row.in_registers == 2   ? cross_entropy_on_chip_kernel<T, 2>
                  : row.in_registers == 4 ? cross_entropy_on_chip_kernel<T, 4>
                                          : cross_entropy_on_chip_kernel<T, 8>;
    if constexpr (has_wide_tile)
        if (row.in_registers == wide_tile) kernel = cross_entropy_on_chip_kernel<T, wide_tile>;
    const size_t lds = static_cast<size_t>(row.in_lds) * static_cast<size_t>(row.threads) * 16;
    // At least one a multiprocessor is resident; to ask for more costs the host a microsecond.
    int64_t resident = device_properties().multiprocessors;
    if (N > resident) resident *= resident_blocks(kernel, row.threads, lds);
    launch(Grid(static_cast<unsigned>(std::min(N, resident)), row.threads, context.stream, lds), kernel,
           losses.data, dlogits.data, logits.data, targets, dlosses, N, V, logits.stride[0], dloss,
           ignore_index, row.in_lds);
    if (mean || num_valid) mean_loss_one_block(mean, num_valid, losses, targets, ignore_index, context);
}

Operation cross_entropy(
    "cross_entropy<T: f32 bf16 fp16 f64, A: arithmetic(T)>"
    "(losses: A[N], dlogits?: T[N,V] strided may_share(logits), mean?: A[] mean, num_valid?: A[];"
    " logits: T[N,V] strided, targets: i32[N] strided <V except(ignore_index), dlosses?: A[N] strided;"
    " dloss: float {0.25, 1}, ignore_index: int {-100, 0, 5}) rows(N) empty(N)"
    " test(N=4, V=128256) test(N=1, V=131080) test(N=4, V=50003) test(N=3, V=40001)",
    "losses = logsumexp(logits) - logits[target], their mean, and the gradient of logits",
    {{"cpu", "rows over threads, three passes over a cached row",
      instantiations<LLAMAC_FLOATS(cross_entropy_cpu)>()},
     {"on_chip", "one block per row, which stays in registers and LDS, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(cross_entropy_on_chip)>(), row_fits, blocks_of(1024, 128, 64)},
     {"vectorized", "one block per row, sum and maximum in one pass, gradient in a second, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(cross_entropy_vectorized)>(), rows_have_vectors,
      blocks_of(512, 1024, 256)},
     {"naive", "one thread per row", instantiations<LLAMAC_KERNELS(cross_entropy_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(cross_entropy_reference), cross_entropy_reference<double>>()}},
    [](const Call& c) { return 6.0 * c["N"] * c["V"]; });

}  // namespace
}  // namespace llamac
