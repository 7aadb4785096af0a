// Operations of a vocabulary whose columns of logits, and rows of tables, are divided among R ranks (model/mesh.h).
//
//   vocabulary_ids       out = ids - first, if this rank has the token: first <= ids < first + count; else `other`; ids < 0 stay
//   softmax_parts        out[n] = (largest, sum, at_target) of this rank's columns: max_v logits[n,v],
//                        sum_v e^(logits[n,v] - largest), logits[n,targets[n]] or, if the target is another rank's, 0
//   cross_entropy_parts  with the parts of all ranks, largest = max_r largest_r, sum = sum_r sum_r e^(largest_r - largest):
//                        losses[n]    = log(sum) + largest - sum_r at_target_r
//                        dlogits[n,v] = dloss * dlosses[n] * (e^(logits[n,v] - largest) / sum - [v = targets[n]])
//
// So ranks exchange three numbers per row (Shoeybi et al., "Megatron-LM", 2019), and parts are combined in the order of ranks: all
// ranks have the same bits. A target that is no column of this rank is negative; ignore_index as in cross_entropy.hip, where the
// mathematics is explained. dlogits may be logits' memory, or null.
//
// reference:  plain loops, sums in double.
// cpu:        rows over threads.
// naive:      one thread per row, or per token.
// vectorized: one block per row, 128-bit accesses where rows allow them.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "core/device.h"
#include "core/operation.h"
#include "core/simd.h"

namespace llamac {
namespace {

// ---- vocabulary_ids

__host__ __device__ inline int32_t id_of_rank(int32_t id, int64_t first, int64_t count, int64_t other) {
    if (id < 0) return id;
    return static_cast<int32_t>(id >= first && id < first + count ? id - first : other);
}

void vocabulary_ids_reference(View<int32_t, 1> out, View<const int32_t, 1> ids, int64_t first, int64_t count,
                              int64_t other) {
    for (int64_t n = 0; n < out.shape[0]; n++) out(n) = id_of_rank(ids(n), first, count, other);
}

__global__ void vocabulary_ids_naive_kernel(int32_t* out, const int32_t* ids, int64_t N, int64_t first,
                                            int64_t count, int64_t other) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (n < N) out[n] = id_of_rank(ids[n], first, count, other);
}

void vocabulary_ids_naive(View<int32_t, 1> out, View<const int32_t, 1> ids, int64_t first, int64_t count,
                          int64_t other, LaunchContext context) {
    const int64_t N = out.shape[0];
    launch(context.grid(N), vocabulary_ids_naive_kernel, out.data, ids.data, N, first, count, other);
}

// ---- softmax_parts and cross_entropy_parts: a row of parts

template <class A>
struct Part {
    A largest, sum, at_target;
};

// Of all ranks. parts: [R,N,3]
template <class A>
__host__ __device__ Part<A> combined(const A* parts, int64_t R, int64_t N, int64_t n) {
    const auto of = [=](int64_t r) { return parts + (r * N + n) * 3; };
    Part<A> all{of(0)[0], 0, 0};
    for (int64_t r = 1; r < R; r++) all.largest = of(r)[0] > all.largest ? of(r)[0] : all.largest;
    for (int64_t r = 0; r < R; r++) {
        all.sum += of(r)[1] * exp(of(r)[0] - all.largest);
        all.at_target += of(r)[2];
    }
    return all;
}
template <class A>
__host__ __device__ A loss_of(const Part<A>& all) {
    return log(all.sum) + (all.largest - all.at_target);
}

template <class T>
void softmax_parts_reference(View<arithmetic<T>, 2> out, View<const T, 2> logits,
                             View<const int32_t, 1> targets) {
    using A = arithmetic<T>;
    for (int64_t n = 0; n < logits.shape[0]; n++) {
        const int64_t V = logits.shape[1], target = targets(n);
        A largest = A(logits(n, 0));
        for (int64_t v = 1; v < V; v++) largest = std::max(largest, A(logits(n, v)));
        double sum = 0;
        for (int64_t v = 0; v < V; v++) sum += std::exp(A(logits(n, v)) - largest);
        out(n, 0) = largest, out(n, 1) = A(sum);
        out(n, 2) = target >= 0 && target < V ? A(logits(n, target)) : A(0);
    }
}

template <class T>
void cross_entropy_parts_reference(View<arithmetic<T>, 1> losses, View<T, 2> dlogits, View<const T, 2> logits,
                                   View<const int32_t, 1> targets, View<const arithmetic<T>, 3> parts,
                                   View<const arithmetic<T>, 1> dlosses, double dloss, int64_t ignore_index) {
    using A = arithmetic<T>;
    const int64_t N = logits.shape[0], V = logits.shape[1];
    for (int64_t n = 0; n < N; n++) {
        const Part<A> all = combined(parts.data, parts.shape[0], N, n);
        const bool counts = targets(n) != ignore_index;
        losses(n) = counts ? loss_of(all) : A(0);
        const A factor = counts ? A(dloss) * (dlosses ? dlosses(n) : A(1)) : A(0);
        for (int64_t v = 0; dlogits && v < V; v++) {
            const A probability = std::exp(A(logits(n, v)) - all.largest) / all.sum;
            dlogits(n, v) = counts ? T(factor * (probability - (v == targets(n) ? A(1) : A(0)))) : T(0);
        }
    }
}

template <class T>
void softmax_parts_cpu(View<float, 2> out, View<const T, 2> logits, View<const int32_t, 1> targets) {
    const int64_t V = logits.shape[1];
#pragma omp parallel for
    for (int64_t n = 0; n < logits.shape[0]; n++) {
        const T* x = &logits(n, 0);
        float largest = float(x[0]);
#pragma omp simd reduction(max : largest)
        for (int64_t v = 0; v < V; v++) largest = std::max(largest, float(x[v]));
        out(n, 0) = largest;
        out(n, 1) =
            static_cast<float>(block_sum(V, [=](int64_t v) { return fast_exp(float(x[v]) - largest); }));
        out(n, 2) = targets(n) >= 0 && targets(n) < V ? float(x[targets(n)]) : 0.0f;
    }
}

template <class T>
void cross_entropy_parts_cpu(View<float, 1> losses, View<T, 2> dlogits, View<const T, 2> logits,
                             View<const int32_t, 1> targets, View<const float, 3> parts,
                             View<const float, 1> dlosses, double dloss, int64_t ignore_index) {
    const int64_t N = logits.shape[0], V = logits.shape[1];
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        const Part<float> all = combined(parts.data, parts.shape[0], N, n);
        const int64_t target = targets(n);
        losses(n) = target == ignore_index ? 0 : loss_of(all);
        if (!dlogits) continue;
        T* const dx = &dlogits(n, 0);
        if (target == ignore_index) {
            std::fill(dx, dx + V, T(0));
            continue;
        }
        const T* const x = &logits(n, 0);
        const float factor = static_cast<float>(dloss) * (dlosses ? dlosses(n) : 1.0f),
                    scale = factor / all.sum, largest = all.largest;
        const bool is_own = target >= 0 && target < V;
        const float below = is_own ? float(x[target]) - largest : 0;  // before it is overwritten
#pragma omp simd
        for (int64_t v = 0; v < V; v++) store(dx + v, fast_exp(float(x[v]) - largest) * scale);
        if (is_own) dx[target] = T(factor * (fast_exp(below) / all.sum - 1.0f));
    }
}

// ---- naive

template <class T>
__global__ void softmax_parts_naive_kernel(float* out, View<const T, 2> logits, const int32_t* targets,
                                           int64_t N, int64_t V) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const T* x = &logits(n, 0);
    float largest = float(x[0]);
    for (int64_t v = 1; v < V; v++) largest = fmaxf(largest, float(x[v]));
    double sum = 0;
    for (int64_t v = 0; v < V; v++) sum += double(expf(float(x[v]) - largest));
    out[3 * n] = largest;
    out[3 * n + 1] = static_cast<float>(sum);
    out[3 * n + 2] = targets[n] >= 0 && targets[n] < V ? float(x[targets[n]]) : 0.0f;
}

template <class T>
void softmax_parts_naive(View<float, 2> out, View<const T, 2> logits, View<const int32_t, 1> targets,
                         LaunchContext context) {
    const int64_t N = logits.shape[0];
    launch(context.grid(N), softmax_parts_naive_kernel<T>, out.data, logits, targets.data, N,
           logits.shape[1]);
}

template <class T>
__global__ void cross_entropy_parts_naive_kernel(float* losses, View<T, 2> dlogits, View<const T, 2> logits,
                                                 const int32_t* targets, const float* parts,
                                                 View<const float, 1> dlosses, int64_t R, int64_t N,
                                                 int64_t V, float dloss, int64_t ignore_index) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const Part<float> all = combined(parts, R, N, n);
    const int64_t target = targets[n];
    const bool counts = target != ignore_index;
    losses[n] = counts ? loss_of(all) : 0.0f;
    const float factor = dlosses ? dloss * dlosses(n) : dloss;
    for (int64_t v = 0; dlogits && v < V; v++) {
        const float probability = expf(float(logits(n, v)) - all.largest) / all.sum;
        dlogits(n, v) = T(counts ? factor * (probability - (v == target ? 1.0f : 0.0f)) : 0.0f);
    }
}

template <class T>
void cross_entropy_parts_naive(View<float, 1> losses, View<T, 2> dlogits, View<const T, 2> logits,
                               View<const int32_t, 1> targets, View<const float, 3> parts,
                               View<const float, 1> dlosses, double dloss, int64_t ignore_index,
                               LaunchContext context) {
    const int64_t N = logits.shape[0];
    launch(context.grid(N), cross_entropy_parts_naive_kernel<T>, losses.data, dlogits, logits, targets.data,
           parts.data, dlosses, parts.shape[0], N, logits.shape[1], static_cast<float>(dloss), ignore_index);
}

// ---- vectorized: one block per row

template <class T>
__device__ float exponential(float x) {
    return narrow<T> ? fast_exp2(x * 1.44269504f) : expf(x);
}

template <class T, bool whole>
__global__ void __launch_bounds__(max_threads_per_block)
    softmax_parts_vectorized_kernel(Dependent<float*> out_, Dependent<const T*> logits_,
                                    Dependent<const int32_t*> targets_, int64_t V, int64_t stride) {
    const auto [out, logits, targets] = wait(out_, logits_, targets_);
    constexpr int size = vector_size<T>;
    struct Shared {
        float maxima[max_warps], sums[max_warps];
    };
    Shared& shared = shared_memory<Shared>();
    const T* row = logits + blockIdx.x * stride;
    float largest = -FLT_MAX, sum = 0;  // finite: a part of nothing but -infinity has sum 0, not NaN
    for (int64_t begin = int64_t{threadIdx.x} * size; begin < V; begin += int64_t{blockDim.x} * size) {
        float x[size];
        unpack<T>(load_part<whole>(row, begin, V), x);
        const float before = largest;
        for (int i = 0; i < size; i++)
            if (begin + i < V) largest = fmaxf(largest, x[i]);
        sum *= exponential<T>(before - largest);
        for (int i = 0; i < size; i++)
            if (begin + i < V) sum += exponential<T>(x[i] - largest);
    }
    const float all = block_max(largest, shared.maxima);
    sum = block_sum(sum * exponential<T>(largest - all), shared.sums);
    if (threadIdx.x != 0) return;
    float* const to = out + int64_t{3} * blockIdx.x;
    const int target = targets[blockIdx.x];
    to[0] = all;
    to[1] = sum;
    to[2] = target >= 0 && target < V ? float(row[target]) : 0.0f;
}

template <class T>
void softmax_parts_vectorized(View<float, 2> out, View<const T, 2> logits, View<const int32_t, 1> targets,
                              LaunchContext context) {
    const int64_t V = logits.shape[1], stride = logits.stride[0];
    const bool whole = is_whole({logits.data}, V, vector_size<T>) && stride % vector_size<T> == 0;
    launch(Grid(blocks_for(logits.shape[0], 1), context.threads, context.stream),
           whole ? softmax_parts_vectorized_kernel<T, true> : softmax_parts_vectorized_kernel<T, false>,
           out.data, logits.data, targets.data, V, stride);
}

template <class T, bool whole>
__global__ void __launch_bounds__(max_threads_per_block)
    cross_entropy_parts_vectorized_kernel(Dependent<float*> losses_, Dependent<T*> dlogits_,
                                          Dependent<const T*> logits_, Dependent<const int32_t*> targets_,
                                          Dependent<const float*> parts_,
                                          Dependent<View<const float, 1>> dlosses_, int64_t R, int64_t N,
                                          int64_t V, int64_t stride, int64_t dstride, float dloss,
                                          int64_t ignore_index) {
    const auto [losses, dlogits, logits, targets, parts, dlosses] =
        wait(losses_, dlogits_, logits_, targets_, parts_, dlosses_);
    constexpr int size = vector_size<T>;
    const int64_t n = blockIdx.x, target = targets[n];
    const bool counts = target != ignore_index;
    const Part<float> all = combined(parts, R, N, n);
    if (threadIdx.x == 0) losses[n] = counts ? loss_of(all) : 0.0f;
    if (!dlogits) return;
    const float factor = dlosses ? dloss * dlosses(n) : dloss, scale = factor / all.sum;
    const T* x = logits + n * stride;
    T* dx = dlogits + n * dstride;
    for (int64_t begin = int64_t{threadIdx.x} * size; begin < V; begin += int64_t{blockDim.x} * size) {
        float values[size];
        unpack<T>(load_part<whole>(x, begin, V), values);
        for (int i = 0; i < size; i++) {
            const float part = exponential<T>(values[i] - all.largest);
            values[i] = begin + i == target ? factor * (part / all.sum - 1.0f) : part * scale;
            if (!counts) values[i] = 0;
        }
        store_part<whole>(dx, begin, V, pack<T>(values));
    }
}

template <class T>
void cross_entropy_parts_vectorized(View<float, 1> losses, View<T, 2> dlogits, View<const T, 2> logits,
                                    View<const int32_t, 1> targets, View<const float, 3> parts,
                                    View<const float, 1> dlosses, double dloss, int64_t ignore_index,
                                    LaunchContext context) {
    const int64_t N = logits.shape[0], V = logits.shape[1], size = vector_size<T>;
    const int64_t stride = logits.stride[0], dstride = dlogits.data ? dlogits.stride[0] : 0;
    const bool whole =
        is_whole({logits.data, dlogits.data}, V, vector_size<T>) && stride % size == 0 && dstride % size == 0;
    launch(Grid(blocks_for(N, 1), context.threads, context.stream),
           whole ? cross_entropy_parts_vectorized_kernel<T, true>
                 : cross_entropy_parts_vectorized_kernel<T, false>,
           losses.data, dlogits.data, logits.data, targets.data, parts.data, dlosses, parts.shape[0], N, V,
           stride, dstride, static_cast<float>(dloss), ignore_index);
}

constexpr BlockSizes block_sizes = blocks_of(512, 1024, 256);

Operation vocabulary_ids(
    "vocabulary_ids(out: i32[N]; ids: i32[N] >0; first: int {3}, count: int {5}, other: int {7})"
    " empty(N)",
    "out = ids - first, or `other` for those of other ranks",
    {{"naive", "one thread per token", instantiations<vocabulary_ids_naive>()},
     {"reference", "plain loops", instantiations<vocabulary_ids_reference>()}});

Operation softmax_parts(
    "softmax_parts<T: f32 bf16 fp16 f64, A: arithmetic(T)>"
    "(out: A[N,3]; logits: T[N,V] strided, targets: i32[N] <V) empty(N) test(N=3, V=4096) test(N=2, V=5003)",
    "out = each row's largest value, its sum of exponentials over that, its target's logit",
    {{"cpu", "rows over threads", instantiations<LLAMAC_FLOATS(softmax_parts_cpu)>()},
     {"vectorized", "one block per row, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(softmax_parts_vectorized)>(), nullptr, block_sizes},
     {"naive", "one thread per row", instantiations<LLAMAC_KERNELS(softmax_parts_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(softmax_parts_reference), softmax_parts_reference<double>>()}},
    [](const Call& c) { return 3.0 * c["N"] * c["V"]; });

Operation cross_entropy_parts(
    "cross_entropy_parts<T: f32 bf16 fp16 f64, A: arithmetic(T)>"
    "(losses: A[N], dlogits?: T[N,V] strided may_share(logits);"
    " logits: T[N,V] strided, targets: i32[N] <V except(ignore_index), parts: A[R,N,3] >0, dlosses?: A[N] "
    "strided;"
    " dloss: float {0.25, 1}, ignore_index: int {-100, 0, 5}) empty(N) test(N=3, R=2, V=4096)"
    " test(N=2, R=3, V=5003)",
    "cross-entropy and its gradient, of a rank's columns, by the softmax_parts of all ranks",
    {{"cpu", "rows over threads", instantiations<LLAMAC_FLOATS(cross_entropy_parts_cpu)>()},
     {"vectorized", "one block per row, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(cross_entropy_parts_vectorized)>(), nullptr, block_sizes},
     {"naive", "one thread per row", instantiations<LLAMAC_KERNELS(cross_entropy_parts_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(cross_entropy_parts_reference), cross_entropy_parts_reference<double>>()}},
    [](const Call& c) { return 3.0 * c["N"] * c["V"]; });

}  // namespace
}  // namespace llamac
