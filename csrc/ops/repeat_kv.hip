// Grouped-query attention (Ainslie et al., "GQA", 2023) for an attention with a key/value head per query head: query head h
// reads key/value head h / (NH/NKV).
//
//   out[b,t,h,:] = x[b,t,h/(NH/NKV),:]
//   dx[b,t,k,:]  = sum of dout[b,t,h,:] over the NH/NKV heads h of group k
//
// For attentions of others: llamac's own reads the shared head in place.
//
// reference:  plain loops.
// naive:      one thread per element of out, of dx.
// vectorized: 128-bit accesses. Forward: a thread writes two vectors of out, so that stores pass through memory without gaps; a
//             group's reads of their head meet in the cache. (A thread that reads a vector once and writes it to its group's
//             heads is 4% slower.) Backward: the loads of four heads in flight, added in their order.
//
// Measured: docs/benchmarks/nvidia-h200.md.
#include <algorithm>

#include "core/device.h"
#include "core/operation.h"

namespace llamac {
namespace {

template <class T>
void repeat_kv_forward_reference(View<T, 4> out, View<const T, 4> x) {
    const int64_t B = out.shape[0], time = out.shape[1], NH = out.shape[2], HD = out.shape[3];
    const int64_t group = NH / x.shape[2];
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < B; b++)
        for (int64_t t = 0; t < time; t++)
            for (int64_t h = 0; h < NH; h++)
                for (int64_t i = 0; i < HD; i++) out(b, t, h, i) = x(b, t, h / group, i);
}

template <class T>
void repeat_kv_backward_reference(View<T, 4> dx, View<const T, 4> dout) {
    using A = arithmetic<T>;
    const int64_t B = dx.shape[0], time = dx.shape[1], NKV = dx.shape[2], HD = dx.shape[3];
    const int64_t group = dout.shape[2] / NKV;
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < B; b++)
        for (int64_t t = 0; t < time; t++)
            for (int64_t k = 0; k < NKV; k++)
                for (int64_t i = 0; i < HD; i++) {
                    A sum = 0;
                    for (int64_t h = k * group; h < (k + 1) * group; h++) sum += A(dout(b, t, h, i));
                    dx(b, t, k, i) = T(sum);
                }
}

// ---- naive

template <class T>
__global__ void repeat_kv_forward_naive_kernel(T* out, Heads<const T> x, int64_t count, int64_t time,
                                               int64_t NH, int64_t HD, int64_t group) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const int64_t h = i / HD % NH, t = i / HD / NH % time, b = i / HD / NH / time;
    out[i] = x.at(b, t, h / group)[i % HD];
}

template <class T>
void repeat_kv_forward_naive(View<T, 4> out, View<const T, 4> x, LaunchContext context) {
    const int64_t B = out.shape[0], time = out.shape[1], NH = out.shape[2], HD = out.shape[3];
    const int64_t count = B * time * NH * HD;
    launch(context.grid(count), repeat_kv_forward_naive_kernel<T>, out.data, heads(x), count, time, NH, HD,
           NH / x.shape[2]);
}

template <class T>
__global__ void repeat_kv_backward_naive_kernel(Heads<T> dx, const T* dout, int64_t count, int64_t time,
                                                int64_t NKV, int64_t HD, int64_t group) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const int64_t row = i / HD, t = row / NKV % time, b = row / NKV / time;
    float sum = 0;
    for (int64_t g = 0; g < group; g++) sum += float(dout[(row * group + g) * HD + i % HD]);
    dx.at(b, t, row % NKV)[i % HD] = T(sum);
}

template <class T>
void repeat_kv_backward_naive(View<T, 4> dx, View<const T, 4> dout, LaunchContext context) {
    const int64_t B = dx.shape[0], time = dx.shape[1], NKV = dx.shape[2], HD = dx.shape[3];
    const int64_t count = B * time * NKV * HD;
    launch(context.grid(count), repeat_kv_backward_naive_kernel<T>, heads(dx), dout.data, count, time, NKV,
           HD, dout.shape[2] / NKV);
}

// ---- vectorized: 128-bit accesses

constexpr int block_threads = 512;   // at most
constexpr int heads_per_thread = 2;  // forward
constexpr int loads_per_thread = 4;  // backward, before the first is added

// n / d for n < 2^31 as a product and a shift: three divisions a vector of 16 bytes would take longer than
// its way through memory.
struct Divisor {
    unsigned d, multiplier, shift;

    explicit Divisor(int64_t d_) : d(static_cast<unsigned>(d_)), shift(31) {
        while ((int64_t{1} << (shift - 31)) < d_) shift++;
        multiplier = static_cast<unsigned>(((uint64_t{1} << shift) + d - 1) / d);
    }
    __device__ unsigned quotient(unsigned n) const {
        return static_cast<unsigned>(uint64_t{n} * multiplier >> shift);
    }
};

// threadIdx.x and blockIdx.y: which channels; threadIdx.y and blockIdx.x: which of all B * time * NH heads of
// out. A thread's heads lie blockDim.y apart.
template <class T, bool whole>
__global__ void __launch_bounds__(block_threads)
    repeat_kv_forward_vectorized_kernel(Dependent<T*> out_, Dependent<Heads<const T>> x_, unsigned count,
                                        Dependent<Divisor> time_, Dependent<Divisor> NH_,
                                        Dependent<Divisor> group_, int64_t HD) {
    const auto [out, x, time, NH, group] = wait(out_, x_, time_, NH_, group_);
    const int64_t c = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * vector_size<T>;
    const unsigned first = blockIdx.x * (heads_per_thread * blockDim.y) + threadIdx.y;
    if (c >= HD) return;
    uint4 part[heads_per_thread];
#pragma unroll
    for (int k = 0; k < heads_per_thread; k++) {
        const unsigned head = first + k * blockDim.y, position = NH.quotient(head);
        const unsigned b = time.quotient(position);
        const T* from = x.at(b, position - b * time.d, group.quotient(head - position * NH.d));
        part[k] = load_part<whole>(from, c, head < count ? HD : 0);
    }
#pragma unroll
    for (int k = 0; k < heads_per_thread; k++) {
        const unsigned head = first + k * blockDim.y;
        if (head >= count) return;
        T* to = out + int64_t{head} * HD;
        if constexpr (whole)
            store128_streaming(to + c, part[k]);
        else
            store_part<false>(to, c, HD, part[k]);
    }
}

template <class T, bool whole>
__global__ void __launch_bounds__(block_threads)
    repeat_kv_backward_vectorized_kernel(Dependent<Heads<T>> dx_, Dependent<const T*> dout_, unsigned count,
                                         Dependent<Divisor> time_, Dependent<Divisor> NKV_, int64_t HD,
                                         unsigned group) {
    const auto [dx, dout, time, NKV] = wait(dx_, dout_, time_, NKV_);
    constexpr int size = vector_size<T>;
    const int64_t c = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * size;
    const unsigned head = blockIdx.x * blockDim.y + threadIdx.y;
    if (c >= HD || head >= count) return;
    const T* from = dout + int64_t{head} * group * HD;
    float sum[size] = {};
    for (unsigned g = 0; g < group; g += loads_per_thread) {
        uint4 part[loads_per_thread];
#pragma unroll
        for (int k = 0; k < loads_per_thread; k++)
            part[k] = load_part<whole>(from + (g + k) * HD, c, g + k < group ? HD : 0);
#pragma unroll
        for (int k = 0; k < loads_per_thread; k++) {
            float d[size];
            unpack<T>(part[k], d);
            for (int i = 0; i < size; i++) sum[i] += d[i];
        }
    }
    const unsigned position = NKV.quotient(head), b = time.quotient(position);
    store_part<whole>(dx.at(b, position - b * time.d, head - position * NKV.d), c, HD, pack<T>(sum));
}

// Blocks and threads of the kernels above for `count` heads, heads_each a thread.
struct Tiles {
    dim3 blocks, threads;
};
Tiles tiles(int64_t count, int64_t HD, int size, int heads_each, int threads) {
    const int64_t vectors = (HD + size - 1) / size;
    const unsigned across = static_cast<unsigned>(std::min<int64_t>(vectors, threads));
    const unsigned down = static_cast<unsigned>(threads) / across;
    return {dim3(blocks_for(count, int64_t{heads_each} * down), blocks_for(vectors, across)),
            dim3(across, down)};
}

template <class T>
bool whole_heads(const View<T, 4>& x, const void* contiguous) {
    constexpr int size = vector_size<T>;
    return is_whole({x.data, contiguous}, x.shape[3], size) &&
           (x.stride[0] | x.stride[1] | x.stride[2]) % size == 0;
}

template <class T>
void repeat_kv_forward_vectorized(View<T, 4> out, View<const T, 4> x, LaunchContext context) {
    const int64_t time = x.shape[1], NH = out.shape[2], HD = x.shape[3], count = x.shape[0] * time * NH;
    const Tiles t = tiles(count, HD, vector_size<T>, heads_per_thread, context.threads);
    launch(Grid(t.blocks, t.threads, context.stream),
           whole_heads(x, out.data) ? repeat_kv_forward_vectorized_kernel<T, true>
                                    : repeat_kv_forward_vectorized_kernel<T, false>,
           out.data, heads(x), count, Divisor(time), Divisor(NH), Divisor(NH / x.shape[2]), HD);
}

template <class T>
void repeat_kv_backward_vectorized(View<T, 4> dx, View<const T, 4> dout, LaunchContext context) {
    const int64_t time = dx.shape[1], NKV = dx.shape[2], HD = dx.shape[3], count = dx.shape[0] * time * NKV;
    const Tiles t = tiles(count, HD, vector_size<T>, 1, context.threads);
    launch(Grid(t.blocks, t.threads, context.stream),
           whole_heads(dx, dout.data) ? repeat_kv_backward_vectorized_kernel<T, true>
                                      : repeat_kv_backward_vectorized_kernel<T, false>,
           heads(dx), dout.data, count, Divisor(time), Divisor(NKV), HD, dout.shape[2] / NKV);
}

constexpr BlockSizes block_sizes = blocks_of(block_threads, 256, 128);

constexpr Constraints few_heads{"fewer than 2^31 heads",
                                [](const Call& c) { return c["B"] * c["T"] < (int64_t{1} << 31) / c["NH"]; }};

Operation repeat_kv_forward(
    "repeat_kv_forward<T: f32 bf16 fp16 f64>"
    "(out: T[B,T,NH,HD]; x: T[B,T,NKV,HD] strided)"
    " empty(B, T) multiple(NH, NKV) derivative repeat_kv_backward(dx: grad x; dout: grad out)",
    "every key/value head NH/NKV times",
    {{"vectorized", "stores in one run, 128-bit accesses",
      instantiations<LLAMAC_FLOATS(repeat_kv_forward_vectorized)>(), few_heads, block_sizes},
     {"naive", "one thread per element", instantiations<LLAMAC_FLOATS(repeat_kv_forward_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(repeat_kv_forward_reference), repeat_kv_forward_reference<double>>()}});

Operation repeat_kv_backward(
    "repeat_kv_backward<T: f32 bf16 fp16 f64>"
    "(dx: T[B,T,NKV,HD] strided; dout: T[B,T,NH,HD])"
    " empty(B, T) multiple(NH, NKV)",
    "the gradients of a group's heads, added",
    {{"vectorized", "the loads of four heads in flight, 128-bit accesses",
      instantiations<LLAMAC_FLOATS(repeat_kv_backward_vectorized)>(), few_heads, block_sizes},
     {"naive", "one thread per element", instantiations<LLAMAC_FLOATS(repeat_kv_backward_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(repeat_kv_backward_reference), repeat_kv_backward_reference<double>>()}},
    [](const Call& c) { return 1.0 * c["B"] * c["T"] * c["NH"] * c["HD"]; });

}  // namespace
}  // namespace llamac
