// Rotary position embedding (Su et al., "RoFormer", 2021): every pair of a head's channels is turned by its position's angle.
//
//   (out_a, out_b) = (x_a cos - x_b sin, x_b cos + x_a sin),   cos, sin = cis[t,j,:], j < HD/2
//   pairs (a, b):  half split (Hugging Face) (j, j + HD/2);  interleaved (Llama's own weights) (2j, 2j+1)
//
// Backward turns the gradient back: the same with -sin. Output may be input's memory: a pair is read before it is written.
//
// reference:  plain loops.
// cpu:        positions over threads; a position's cosines and sines are laid out as vectors once for all its heads.
// naive:      one thread per pair.
// vectorized: 128-bit accesses: a thread has the same channels in four heads of one position, with all loads in flight before
//             the first is used, the cosines and sines once for the four.
//
// Measured: docs/benchmarks/nvidia-h200.md.
#include <algorithm>

#include "core/device.h"
#include "core/scratch.h"
#include "ops/rope.h"

namespace llamac {
namespace {

template <class T>
void rotate_interleaved(T* out, const T* x, const float* c, const float* s, int64_t half) {
#pragma omp simd
    for (int64_t j = 0; j < half; j++) {
        const float x0 = float(x[2 * j]), x1 = float(x[2 * j + 1]);
        store(out + 2 * j, x0 * c[j] - x1 * s[j]);
        store(out + 2 * j + 1, x1 * c[j] + x0 * s[j]);
    }
}

template <class T, int direction>
void rope_cpu(View<T, 4> out, View<const T, 4> x, View<const float, 3> cis, bool interleaved) {
    const int64_t B = x.shape[0], time = x.shape[1], NH = x.shape[2], half = x.shape[3] / 2;
#pragma omp parallel if (time > 1)
    {
        static thread_local Scratch own;
        float *cosines = own.reserve<float>(2 * half), *sines = cosines + half;
#pragma omp for
        for (int64_t t = 0; t < time; t++) {
            split_angles<direction>(&cis(t, 0, 0), cosines, sines, half);
            for (int64_t b = 0; b < B; b++)
                for (int64_t h = 0; h < NH; h++) {
                    const auto rotate = interleaved ? rotate_interleaved<T> : rotate_half_split<T>;
                    rotate(&out(b, t, h, 0), &x(b, t, h, 0), cosines, sines, half);
                }
        }
    }
}

// ---- naive

// direction: 1 forward, -1 backward.
template <class T>
__global__ void rope_naive_kernel(Heads<T> out, Heads<const T> x, const float* cis, int64_t B, int64_t time,
                                  int64_t NH, int64_t half, bool interleaved, float direction) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const int64_t j = i % half, h = i / half % NH, t = i / half / NH % time, b = i / half / NH / time;
    if (b >= B) return;
    const int64_t i0 = interleaved ? 2 * j : j, i1 = interleaved ? 2 * j + 1 : j + half;
    const float x0 = float(x.at(b, t, h)[i0]), x1 = float(x.at(b, t, h)[i1]);
    const float c = cis[2 * (t * half + j)], s = direction * cis[2 * (t * half + j) + 1];
    out.at(b, t, h)[i0] = T(rotated(x0, x1, c, -s));
    out.at(b, t, h)[i1] = T(rotated(x1, x0, c, s));
}

template <class T, int direction>
void rope_naive(View<T, 4> out, View<const T, 4> x, View<const float, 3> cis, bool interleaved,
                LaunchContext context) {
    const int64_t B = x.shape[0], time = x.shape[1], NH = x.shape[2], half = x.shape[3] / 2;
    launch(context.grid(B * time * NH * half), rope_naive_kernel<T>, heads(out), heads(x), cis.data, B, time,
           NH, half, interleaved, direction);
}

// ---- vectorized: four heads per thread

constexpr int block_threads = 512;  // at most
// One where accesses are narrow: there more addresses than registers would be in flight.
template <bool whole>
constexpr int heads_per_thread = whole ? 4 : 1;

// x[0 .. size) are first channels, y[0 .. size) second ones (half split), or each holds whole pairs
// (interleaved). turn[2 size]: the pairs' (cos, sin), x's before y's where they differ.
template <bool interleaved, int size>
__device__ inline void rotate(float (&x)[size], float (&y)[size], const float (&turn)[2 * size]) {
#pragma unroll
    for (int i = 0; i < size; i++) {
        // Pair i: of x and y (half split); of x alone, then of y alone (interleaved).
        float& a = !interleaved ? x[i] : i < size / 2 ? x[2 * i] : y[2 * i - size];
        float& b = !interleaved ? y[i] : i < size / 2 ? x[2 * i + 1] : y[2 * i + 1 - size];
        const float x0 = a, x1 = b, c = turn[2 * i], s = turn[2 * i + 1];
        a = rotated(x0, x1, c, -s);
        b = rotated(x1, x0, c, s);
    }
}

// threadIdx.x and blockIdx.y: which channels; threadIdx.y and blockIdx.x: which position of all B * time and
// which of its groups of heads. A group's heads lie `groups` apart: neighbors in a warp read neighboring
// heads. A thread has two vectors of a head. Half split, they are from the two halves and make pairs.
// Interleaved, each holds pairs of its own; there the second half begins where the last vector of the first
// ends.
template <class T, bool whole, bool interleaved>
__global__ void __launch_bounds__(block_threads)
    rope_vectorized_kernel(Dependent<Heads<T>> out_, Dependent<Heads<const T>> x_,
                           Dependent<const float*> cis_, unsigned positions, unsigned time, unsigned NH,
                           int64_t HD, unsigned groups, float direction) {
    const auto [out, x, cis] = wait(out_, x_, cis_);
    constexpr int size = vector_size<T>, heads = heads_per_thread<whole>;
    const unsigned place = blockIdx.x * blockDim.y + threadIdx.y, position = place / groups,
                   group = place % groups;
    const unsigned b = position / time, t = position % time;
    const int64_t c = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * size, half = HD / 2;
    if (position >= positions || c >= half) return;
    const int64_t second = interleaved ? (half + size - 1) / size * size : half;
    const int64_t first_end = interleaved ? HD : half, second_end = HD - second;

    uint4 firsts[heads], seconds[heads];
#pragma unroll
    for (int k = 0; k < heads; k++) {
        const unsigned h = group + k * groups;
        const T* head = x.at(b, t, h);
        firsts[k] = load_part<whole>(head, c, h < NH ? first_end : 0);
        seconds[k] = load_part<whole>(head + second, c, h < NH ? second_end : 0);
    }
    float turn[2 * size];
#pragma unroll
    for (int k = 0; k < 2 * size; k += 4) {
        const int64_t from = !interleaved ? 2 * c + k : k < size ? c + k : second + c + k - size;
        float four[4];
        unpack<float>(load_part<whole>(cis + t * HD, from, HD), four);
        for (int i = 0; i < 4; i++) turn[k + i] = i % 2 ? direction * four[i] : four[i];
    }
#pragma unroll
    for (int k = 0; k < heads; k++) {
        const unsigned h = group + k * groups;
        T* head = out.at(b, t, h);
        float p[size], q[size];
        unpack<T>(firsts[k], p);
        unpack<T>(seconds[k], q);
        rotate<interleaved>(p, q, turn);
        store_part<whole>(head, c, h < NH ? first_end : 0, pack<T>(p));
        store_part<whole>(head + second, c, h < NH ? second_end : 0, pack<T>(q));
    }
}

template <class T>
bool whole_strides(const Heads<T>& x) {
    return (x.stride_b | x.stride_t | x.stride_h) % vector_size<T> == 0;
}

template <class T, int direction>
void rope_vectorized(View<T, 4> out, View<const T, 4> x, View<const float, 3> cis, bool interleaved,
                     LaunchContext context) {
    using Kernel = void (*)(Dependent<Heads<T>>, Dependent<Heads<const T>>, Dependent<const float*>, unsigned,
                            unsigned, unsigned, int64_t, unsigned, float);
    static constexpr Kernel kernels[2][2] = {
        {rope_vectorized_kernel<T, false, false>, rope_vectorized_kernel<T, false, true>},
        {rope_vectorized_kernel<T, true, false>, rope_vectorized_kernel<T, true, true>}};
    constexpr int size = vector_size<T>;
    const int64_t positions = x.shape[0] * x.shape[1], NH = x.shape[2], HD = x.shape[3];
    const bool whole = is_whole({out.data, x.data, cis.data}, interleaved ? HD : HD / 2, size) &&
                       whole_strides(heads(out)) && whole_strides(heads(x));
    const int64_t vectors = (HD / 2 + size - 1) / size,
                  groups = blocks_for(NH, whole ? heads_per_thread<true> : heads_per_thread<false>);
    const unsigned across = static_cast<unsigned>(std::min<int64_t>(vectors, context.threads));
    const unsigned places = static_cast<unsigned>(context.threads) / across;
    launch(Grid(dim3(blocks_for(positions * groups, places), blocks_for(vectors, across)),
                dim3(across, places), context.stream),
           kernels[whole][interleaved], heads(out), heads(x), cis.data, positions, x.shape[1], NH, HD, groups,
           direction);
}

constexpr Constraints few_heads{"fewer than 2^31 heads", has_few_heads};

constexpr BlockSizes block_sizes = blocks_of(256, 128, block_threads);

double rope_flops(const Call& c) {
    return 3.0 * c["B"] * c["T"] * c["NH"] * c["HD"];
}

Operation rope_forward(
    "rope_forward<T: f32 bf16 fp16 f64, A: arithmetic(T)>"
    "(out: T[B,T,NH,HD] strided may_share(x); x: T[B,T,NH,HD] strided, cis: A[T,HD/2,2];"
    " interleaved: bool) empty(B, T)"
    " derivative rope_backward(dx: grad x; dout: grad out, cis; interleaved)",
    "turns every pair of a head's channels by its position's angle",
    {{"cpu", "positions over threads", instantiations<LLAMAC_FLOATS(rope_cpu, 1)>()},
     {"vectorized", "four heads per thread share cosines and sines, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(rope_vectorized, 1)>(), few_heads, block_sizes},
     {"naive", "one thread per pair", instantiations<LLAMAC_KERNELS(rope_naive, 1)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(rope_reference, 1), rope_reference<double, 1>>()}},
    rope_flops);

Operation rope_backward(
    "rope_backward<T: f32 bf16 fp16 f64, A: arithmetic(T)>"
    "(dx: T[B,T,NH,HD] strided may_share(dout); dout: T[B,T,NH,HD] strided, cis: A[T,HD/2,2];"
    " interleaved: bool) empty(B, T)",
    "turns the gradient of rope_forward back",
    {{"cpu", "positions over threads", instantiations<LLAMAC_FLOATS(rope_cpu, -1)>()},
     {"vectorized", "four heads per thread share cosines and sines, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(rope_vectorized, -1)>(), few_heads, block_sizes},
     {"naive", "one thread per pair", instantiations<LLAMAC_KERNELS(rope_naive, -1)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(rope_reference, -1), rope_reference<double, -1>>()}},
    rope_flops);

}  // namespace
}  // namespace llamac
