// QK norm joined with RoPE, in one pass over queries or keys: RMSNorm of every head (Dehghani et al., "Scaling Vision
// Transformers to 22 Billion Parameters", 2023; with RMSNorm in Qwen3), then, where cis is given, the rotation of rope.hip, half
// split. x[b,t,h,:] is a head of HD channels; cos, sin = cis[t,j,:], j < HD/2.
//
//   rstd                 = 1 / sqrt(mean_c x[c]^2 + eps)                 xhat = x * rstd
//   n[c]                 = xhat[c] * weight[c]
//   (out[j], out[j+HD/2]) = (n[j] cos - n[j+HD/2] sin, n[j+HD/2] cos + n[j] sin);  without cis out = n
//
//   g          = dout turned back: the same rotation with -sin;  without cis g = dout
//   dx[c]      = rstd * (g[c] * weight[c] - xhat[c] * mean_c(g[c] * weight[c] * xhat[c]))
//   dweight[c] = sum over all heads of g[c] * xhat[c]
//
// The normalized values are not rounded before the rotation. out may be x's memory, dx that of dout.
//
// reference:  plain loops. Sums over a head and over all heads are double.
// cpu:        positions over threads, vector lanes over channels; dweight by blocks of heads, then over the blocks.
// naive:      one thread per head, one thread per channel for dweight.
// vectorized: 128-bit accesses; neighboring lanes have a head from end to end and add their squares by shuffle. A thread has both
//             channels of its pairs, the same ones in several heads of one position, with all loads in flight before the first is
//             used: every byte moves once. Backward: a block takes every k-th group of heads and keeps its share of dweight in
//             registers: one partial row of dweight per block, added by a second kernel in their order.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/scratch.h"
#include "ops/column_sums.h"
#include "ops/rope.h"

namespace llamac {
namespace {

// Pairs of channels that are turned; the channels from twice as many on keep their values.
template <class T, class A>
int64_t turned_pairs(View<T, 4> x, View<const A, 3> cis) {
    return cis ? x.shape[3] / 2 : 0;
}

template <class T>
void qk_norm_rope_forward_reference(View<T, 4> out, View<arithmetic<T>, 3> rstd, View<const T, 4> x,
                                    View<const T, 1> weight, View<const arithmetic<T>, 3> cis, double eps) {
    using A = arithmetic<T>;
    const int64_t B = x.shape[0], time = x.shape[1], NH = x.shape[2], HD = x.shape[3];
    const int64_t half = turned_pairs(x, cis);
    for (int64_t b = 0; b < B; b++)
        for (int64_t t = 0; t < time; t++)
            for (int64_t h = 0; h < NH; h++) {
                double sum = 0;
                for (int64_t c = 0; c < HD; c++) sum += double(x(b, t, h, c)) * double(x(b, t, h, c));
                const A r = rstd(b, t, h) = A(1 / std::sqrt(sum / double(HD) + eps));
                const auto n = [&](int64_t c) { return A(x(b, t, h, c)) * r * A(weight(c)); };
                for (int64_t j = 0; j < half; j++) {
                    const A n0 = n(j), n1 = n(j + half), c = cis(t, j, 0), s = cis(t, j, 1);
                    out(b, t, h, j) = T(n0 * c - n1 * s);
                    out(b, t, h, j + half) = T(n1 * c + n0 * s);
                }
                for (int64_t c = 2 * half; c < HD; c++) out(b, t, h, c) = T(n(c));
            }
}

template <class T, class G>
void qk_norm_rope_backward_reference(View<T, 4> dx, View<G, 1> dweight, View<const T, 4> dout,
                                     View<const T, 4> x, View<const T, 1> weight,
                                     View<const arithmetic<T>, 3> rstd, View<const arithmetic<T>, 3> cis,
                                     bool accumulate) {
    using A = arithmetic<T>;
    const int64_t B = x.shape[0], time = x.shape[1], NH = x.shape[2], HD = x.shape[3];
    const int64_t half = turned_pairs(x, cis);
    std::vector<A> g(HD), xhat(HD);
    std::vector<double> dw(HD, 0);
    for (int64_t b = 0; b < B; b++)
        for (int64_t t = 0; t < time; t++)
            for (int64_t h = 0; h < NH; h++) {
                for (int64_t c = 0; c < HD; c++) g[c] = A(dout(b, t, h, c));
                for (int64_t j = 0; j < half; j++) {
                    const A d0 = g[j], d1 = g[j + half], c = cis(t, j, 0), s = cis(t, j, 1);
                    g[j] = d0 * c + d1 * s;
                    g[j + half] = d1 * c - d0 * s;
                }
                double dot = 0;
                for (int64_t c = 0; c < HD; c++) {
                    xhat[c] = A(x(b, t, h, c)) * rstd(b, t, h);
                    dot += double(g[c] * A(weight(c))) * double(xhat[c]);
                    dw[c] += double(g[c]) * double(xhat[c]);
                }
                const A mean = A(dot / double(HD));
                for (int64_t c = 0; c < HD; c++)
                    dx(b, t, h, c) = T(rstd(b, t, h) * (g[c] * A(weight(c)) - xhat[c] * mean));
            }
    for (int64_t c = 0; c < HD; c++) dweight(c) = G(A((accumulate ? double(dweight(c)) : 0.0) + dw[c]));
}

// One head; cosines and sines of `half` pairs. Returns rstd.
template <class T>
float norm_rope_head(T* out, const T* x, const T* weight, const float* cosines, const float* sines,
                     int64_t half, int64_t HD, double eps) {
    const double sum = block_sum(HD, [x](int64_t c) { return float(x[c]) * float(x[c]); });
    const float r = static_cast<float>(1 / std::sqrt(sum / static_cast<double>(HD) + eps));
#pragma omp simd
    for (int64_t j = 0; j < half; j++) {
        const float n0 = float(x[j]) * r * float(weight[j]);
        const float n1 = float(x[j + half]) * r * float(weight[j + half]);
        store(out + j, n0 * cosines[j] - n1 * sines[j]);
        store(out + j + half, n1 * cosines[j] + n0 * sines[j]);
    }
#pragma omp simd
    for (int64_t c = 2 * half; c < HD; c++) store(out + c, float(x[c]) * r * float(weight[c]));
    return r;
}

template <class T>
void qk_norm_rope_forward_cpu(View<T, 4> out, View<float, 3> rstd, View<const T, 4> x,
                              View<const T, 1> weight, View<const float, 3> cis, double eps) {
    const int64_t time = x.shape[1], positions = x.shape[0] * time, NH = x.shape[2], HD = x.shape[3];
    const int64_t half = turned_pairs(x, cis);
#pragma omp parallel for if (positions > 1)
    for (int64_t p = 0; p < positions; p++) {
        static thread_local Scratch own;
        float *cosines = own.reserve<float>(2 * half), *sines = cosines + half;
        const int64_t b = p / time, t = p % time;
        if (half) split_angles<1>(&cis(t, 0, 0), cosines, sines, half);
        for (int64_t h = 0; h < NH; h++)
            rstd(b, t, h) =
                norm_rope_head(&out(b, t, h, 0), &x(b, t, h, 0), weight.data, cosines, sines, half, HD, eps);
    }
}

// One head; dw[HD] gathers its share of dweight, g[HD] is scratch.
template <class T>
void norm_rope_backward_head(T* dx, float* dw, float* g, const T* dout, const T* x, const T* weight, float r,
                             const float* cosines, const float* sines, int64_t half, int64_t HD) {
#pragma omp simd
    for (int64_t j = 0; j < half; j++) {
        const float d0 = float(dout[j]), d1 = float(dout[j + half]);
        g[j] = d0 * cosines[j] - d1 * sines[j];
        g[j + half] = d1 * cosines[j] + d0 * sines[j];
    }
#pragma omp simd
    for (int64_t c = 2 * half; c < HD; c++) g[c] = float(dout[c]);
    const double dot = block_sum(HD, [=](int64_t c) { return g[c] * float(weight[c]) * (float(x[c]) * r); });
    const float mean = static_cast<float>(dot / static_cast<double>(HD));
#pragma omp simd
    for (int64_t c = 0; c < HD; c++) {
        const float xhat = float(x[c]) * r;
        dw[c] += g[c] * xhat;
        store(dx + c, r * (g[c] * float(weight[c]) - xhat * mean));
    }
}

template <class T, class G>
void qk_norm_rope_backward_cpu(View<T, 4> dx, View<G, 1> dweight, View<const T, 4> dout, View<const T, 4> x,
                               View<const T, 1> weight, View<const float, 3> rstd, View<const float, 3> cis,
                               bool accumulate) {
    const int64_t time = x.shape[1], NH = x.shape[2], HD = x.shape[3], N = x.shape[0] * time * NH;
    const int64_t half = turned_pairs(x, cis);
    const std::vector<float> dw = column_sums(N, HD, [&](int64_t first, int64_t last, float* sums) {
        static thread_local Scratch own;
        float *g = own.reserve<float>(HD + 2 * half), *cosines = g + HD, *sines = cosines + half;
        for (int64_t n = first; n < last; n++) {
            const int64_t b = n / NH / time, t = n / NH % time, h = n % NH;
            if (half && (n == first || h == 0)) split_angles<-1>(&cis(t, 0, 0), cosines, sines, half);
            norm_rope_backward_head(&dx(b, t, h, 0), sums, g, &dout(b, t, h, 0), &x(b, t, h, 0), weight.data,
                                    rstd(b, t, h), cosines, sines, half, HD);
        }
    });
    for (int64_t c = 0; c < HD; c++) dweight(c) = G((accumulate ? float(dweight(c)) : 0.0f) + dw[c]);
}

// ---- naive

// angles: the position's; half: 0 without a rotation.
template <class T>
__global__ void qk_norm_rope_forward_naive_kernel(Heads<T> out, float* rstd, Heads<const T> x_,
                                                  const T* weight, const float* cis, int64_t N, int64_t time,
                                                  int64_t NH, int64_t HD, int64_t half, float eps) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const int64_t b = n / NH / time, t = n / NH % time, h = n % NH;
    if (n >= N) return;
    const T* x = x_.at(b, t, h);
    T* to = out.at(b, t, h);
    double sum = 0;
    for (int64_t c = 0; c < HD; c++) sum += double(float(x[c])) * double(float(x[c]));
    const float r = static_cast<float>(1 / sqrt(sum / static_cast<double>(HD) + double(eps)));
    for (int64_t j = 0; j < half; j++) {
        const float n0 = float(x[j]) * r * float(weight[j]);
        const float n1 = float(x[j + half]) * r * float(weight[j + half]);
        const float c = cis[2 * (t * half + j)], s = cis[2 * (t * half + j) + 1];
        to[j] = T(rotated(n0, n1, c, -s));
        to[j + half] = T(rotated(n1, n0, c, s));
    }
    for (int64_t c = 2 * half; c < HD; c++) to[c] = T(float(x[c]) * r * float(weight[c]));
    rstd[n] = r;
}

template <class T>
void qk_norm_rope_forward_naive(View<T, 4> out, View<float, 3> rstd, View<const T, 4> x,
                                View<const T, 1> weight, View<const float, 3> cis, double eps,
                                LaunchContext context) {
    const int64_t time = x.shape[1], NH = x.shape[2], HD = x.shape[3], N = x.shape[0] * time * NH;
    launch(context.grid(N), qk_norm_rope_forward_naive_kernel<T>, heads(out), rstd.data, heads(x),
           weight.data, cis.data, N, time, NH, HD, turned_pairs(x, cis), eps);
}

// Channel c of a head's gradient, turned back by the position's angles.
template <class T>
__device__ float turned_back(const T* dout, const float* angles, int64_t c, int64_t half) {
    if (c >= 2 * half) return float(dout[c]);
    const bool first = c < half;
    const float* angle = angles + 2 * (first ? c : c - half);
    return rotated(float(dout[c]), float(dout[first ? c + half : c - half]), angle[0],
                   first ? angle[1] : -angle[1]);
}

template <class T, class G>
__global__ void qk_norm_rope_backward_naive_kernel_columns(G* dweight, Heads<const T> dout, Heads<const T> x,
                                                           const float* rstd, const float* cis, int64_t N,
                                                           int64_t time, int64_t NH, int64_t HD, int64_t half,
                                                           bool accumulate) {
    const int64_t c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (c >= HD) return;
    double sum = accumulate ? double(float(dweight[c])) : 0.0;
    for (int64_t n = 0; n < N; n++) {
        const int64_t b = n / NH / time, t = n / NH % time, h = n % NH;
        const float g = turned_back(dout.at(b, t, h), cis + 2 * t * half, c, half);
        sum += double(g) * double(float(x.at(b, t, h)[c]) * rstd[n]);
    }
    dweight[c] = G(static_cast<float>(sum));
}

template <class T>
__global__ void qk_norm_rope_backward_naive_kernel(Heads<T> dx_, Heads<const T> dout_, Heads<const T> x_,
                                                   const T* weight, const float* rstd, const float* cis,
                                                   int64_t N, int64_t time, int64_t NH, int64_t HD,
                                                   int64_t half) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const int64_t b = n / NH / time, t = n / NH % time, h = n % NH;
    if (n >= N) return;
    const T *x = x_.at(b, t, h), *dout = dout_.at(b, t, h);
    T* const dx = dx_.at(b, t, h);
    const float r = rstd[n];
    const auto g = [=](int64_t c) { return turned_back(dout, cis + 2 * t * half, c, half); };
    double dot = 0;
    for (int64_t c = 0; c < HD; c++) dot += double(g(c) * float(weight[c])) * double(float(x[c]) * r);
    const float mean = static_cast<float>(dot / static_cast<double>(HD));
    const auto gradient = [=](int64_t c) {
        return T(r * (g(c) * float(weight[c]) - float(x[c]) * r * mean));
    };
    for (int64_t j = 0; j < half; j++) {  // both of a pair before either is written: dx may be dout
        const T first = gradient(j), second = gradient(j + half);
        dx[j] = first;
        dx[j + half] = second;
    }
    for (int64_t c = 2 * half; c < HD; c++) dx[c] = gradient(c);
}

template <class T, class G>
void qk_norm_rope_backward_naive(View<T, 4> dx, View<G, 1> dweight, View<const T, 4> dout, View<const T, 4> x,
                                 View<const T, 1> weight, View<const float, 3> rstd, View<const float, 3> cis,
                                 bool accumulate, LaunchContext context) {
    const int64_t time = x.shape[1], NH = x.shape[2], HD = x.shape[3], N = x.shape[0] * time * NH;
    const int64_t half = turned_pairs(x, cis);
    // dweight first: dx may take dout's place.
    launch(context.grid(HD), qk_norm_rope_backward_naive_kernel_columns<T, G>, dweight.data, heads(dout),
           heads(x), rstd.data, cis.data, N, time, NH, HD, half, accumulate);
    launch(context.grid(N), qk_norm_rope_backward_naive_kernel<T>, heads(dx), heads(dout), heads(x),
           weight.data, rstd.data, cis.data, N, time, NH, HD, half);
}

// ---- vectorized: a thread has both channels of its pairs

constexpr int forward_threads = 256;  // at most
// At most; with 128 registers each, this many fill a multiprocessor.
constexpr int backward_threads = max_threads_per_block * registers_in_full_block / 128;
// Heads of a thread at a time; more would need registers of other blocks, or spill on gfx942.
constexpr int forward_heads = 2, backward_heads = registers_in_full_block > 64 ? 1 : 2;

// A head in `lanes` neighboring lanes, a power of two that divides the warp: a thread has one vector of the first half of the
// channels and one of the second.
struct HeadPart {
    unsigned lane, half, first, second;  // channels of a half; the first channels of the two vectors

    __device__ HeadPart(unsigned lanes, int size)
        : lane(threadIdx.x & (lanes - 1)), half(lanes * size), first(lane * size), second(half + first) {}
};

// A group of heads of one position, which moves on by the grid's groups, without divisions. A group's heads lie `groups` apart:
// neighbors in a warp have neighboring heads.
struct Place {
    unsigned group, position, t, b;

    __device__ Place(unsigned place, unsigned groups, unsigned time)
        : group(place % groups), position(place / groups), t(position % time), b(position / time) {}
    __device__ void advance(const Place& by, unsigned groups, unsigned time) {
        group += by.group;
        const bool carry = group >= groups;
        if (carry) group -= groups;
        position += by.position + carry;
        t += by.t + carry;
        b += by.b;
        if (t >= time) t -= time, b++;
    }
};

// The sum over the lanes of a head, in each of them.
__device__ inline float lanes_sum(float sum, unsigned lanes) {
    for (int distance = static_cast<int>(lanes) / 2; distance > 0; distance /= 2)
        sum += __shfl_xor(sum, distance);
    return sum;
}
// (cos, sin) of the thread's pairs.
template <int size>
__device__ inline void load_turn(const float* cis, int64_t t, const HeadPart& part, float (&turn)[2 * size]) {
    const float* const from = cis + 2 * (t * part.half + part.first);
#pragma unroll
    for (int i = 0; i < 2 * size; i += 4) {
        float four[4];
        unpack<float>(load128(from + i), four);
        for (int j = 0; j < 4; j++) turn[i + j] = four[j];
    }
}
// direction: 1 forward, -1 backward.
template <int direction, int size>
__device__ inline void turn_pairs(float (&first)[size], float (&second)[size],
                                  const float (&turn)[2 * size]) {
    for (int i = 0; i < size; i++) {
        const float before = first[i], c = turn[2 * i], s = direction * turn[2 * i + 1];
        first[i] = rotated(before, second[i], c, -s);
        second[i] = rotated(second[i], before, c, s);
    }
}

template <class T, bool turns>
__global__ void __launch_bounds__(forward_threads)
    qk_norm_rope_forward_vectorized_kernel(Dependent<Heads<T>> out_, Dependent<float*> rstd_,
                                           Dependent<Heads<const T>> x_, Dependent<const T*> weight_,
                                           Dependent<const float*> cis_, unsigned positions, unsigned time,
                                           unsigned NH, unsigned lanes, unsigned groups, float eps) {
    const auto [out, rstd, x, weight, cis] = start_next_and_wait(out_, rstd_, x_, weight_, cis_);
    constexpr int size = vector_size<T>, heads = forward_heads;
    const HeadPart part(lanes, size);
    const Place p(blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes, groups, time);
    const bool inside = p.position < positions;
    uint4 own[heads][2];
#pragma unroll
    for (int k = 0; k < heads; k++) {
        const bool is_head = inside && p.group + k * groups < NH;
        const T* const from = x.at(is_head ? p.b : 0, is_head ? p.t : 0, is_head ? p.group + k * groups : 0);
        own[k][0] = load128(from + part.first);
        own[k][1] = load128(from + part.second);
    }
    float w[2][size], turn[2 * size] = {};
    unpack<T>(load128(weight + part.first), w[0]);
    unpack<T>(load128(weight + part.second), w[1]);
    if constexpr (turns) load_turn<size>(cis, inside ? p.t : 0, part, turn);
#pragma unroll
    for (int k = 0; k < heads; k++) {
        const unsigned h = p.group + k * groups;
        float v[2][size], squares = 0;
        for (int j = 0; j < 2; j++) {
            unpack<T>(own[k][j], v[j]);
            for (int i = 0; i < size; i++) squares += v[j][i] * v[j][i];
        }
        const float r = 1.0f / sqrtf(lanes_sum(squares, lanes) / static_cast<float>(2 * part.half) + eps);
        for (int j = 0; j < 2; j++)
            for (int i = 0; i < size; i++) v[j][i] *= r * w[j][i];
        if constexpr (turns) turn_pairs<1>(v[0], v[1], turn);
        if (!inside || h >= NH) continue;
        T* const to = out.at(p.b, p.t, h);
        store128(to + part.first, pack<T>(v[0]));
        store128(to + part.second, pack<T>(v[1]));
        if (part.lane == 0) rstd[int64_t{p.position} * NH + h] = r;
    }
}

// Writes the sums of values[n] over the lanes that are equal modulo `lanes`, a power of two, to to[n]; distance: at first half a
// warp. An exchange halves a lane's values, so there are about as many shuffles as values.
template <int n>
__device__ inline void write_lane_sums(float* to, const float (&values)[n], unsigned distance,
                                       unsigned lanes) {
    if (distance < lanes) {
        for (int i = 0; i < n; i++) to[i] = values[i];
        return;
    }
    if constexpr (n > 1) {
        constexpr int half = n / 2;
        const bool upper = lane_index() & distance;
        float sums[half];
        for (int i = 0; i < half; i++)
            sums[i] = (upper ? values[half + i] : values[i]) +
                      __shfl_xor(upper ? values[i] : values[half + i], distance);
        write_lane_sums(to + (upper ? half : 0), sums, distance / 2, lanes);
    } else {
        const bool writes = !(lane_index() & (2 * distance - lanes));
        float sum = values[0];
        for (; distance >= lanes; distance /= 2) sum += __shfl_xor(sum, distance);
        if (writes) *to = sum;
    }
}

// A block's places are blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes, and on by the grid's; partial[gridDim.x, HD] gets
// its sums of dweight. Dynamic LDS: HD floats per warp.
template <class T, bool turns>
__global__ void __launch_bounds__(backward_threads)
    qk_norm_rope_backward_vectorized_kernel(Dependent<Heads<T>> dx_, Dependent<float*> partial_,
                                            Dependent<Heads<const T>> dout_, Dependent<Heads<const T>> x_,
                                            Dependent<const T*> weight_, Dependent<const float*> rstd_,
                                            Dependent<const float*> cis_, unsigned positions, unsigned time,
                                            unsigned NH, unsigned lanes, unsigned groups) {
    constexpr int size = vector_size<T>, heads = backward_heads;
    const HeadPart part(lanes, size);
    const unsigned in_block = blockDim.x / lanes, HD = 2 * part.half, step = gridDim.x * in_block;
    const float scale = 1.0f / static_cast<float>(HD);  // exact: a power of two
    // What needs no memory comes before the wait.
    Place p(blockIdx.x * in_block + threadIdx.x / lanes, groups, time);
    const Place distance(step, groups, time);
    const auto [dx, partial, dout, x, weight, rstd, cis] =
        start_next_and_wait(dx_, partial_, dout_, x_, weight_, rstd_, cis_);
    float dweight[2][size] = {};
    // Every thread makes as many steps: shuffles are of whole warps.
    for (unsigned first = blockIdx.x * in_block; first < positions * groups;
         first += step, p.advance(distance, groups, time)) {
        // Where there is no head, another one is loaded, with r = 0: conditional loads take more instructions. Beyond the last
        // position, x is loaded for dout, where another thread may store dx.
        const bool inside = p.position < positions;
        const unsigned b = inside ? p.b : 0, t = inside ? p.t : 0;
        const T* const from_x = x.at(b, t, p.group) + part.first;
        const T* const from_dout = inside ? dout.at(b, t, p.group) + part.first : from_x;
        const float* const from_rstd = rstd + int64_t{inside ? p.position : 0} * NH + p.group;
        uint4 own_x[heads][2], own_dout[heads][2];
        float r[heads];
#pragma unroll
        for (int k = 0; k < heads; k++) {
            const bool is_head = inside && p.group + k * groups < NH;
            const unsigned apart = is_head ? k * groups : 0;
            for (int j = 0; j < 2; j++) {
                own_x[k][j] = load128(from_x + apart * x.stride_h + j * part.half);
                own_dout[k][j] = load128(from_dout + apart * dout.stride_h + j * part.half);
            }
            r[k] = from_rstd[apart];
            if (!is_head) r[k] = 0;
        }
        float turn[2 * size] = {};
        if constexpr (turns) load_turn<size>(cis, t, part, turn);
        // Read anew for each position, else floats of it are kept.
        const uint4 w[2] = {load128(weight + part.first), load128(weight + part.second)};
        T* const to = dx.at(b, t, p.group) + part.first;
#pragma unroll
        for (int k = 0; k < heads; k++) {
            float g[2][size], xhat[2][size], dot = 0;
            unpack<T>(own_dout[k][0], g[0]);
            unpack<T>(own_dout[k][1], g[1]);
            if constexpr (turns) turn_pairs<-1>(g[0], g[1], turn);
            for (int j = 0; j < 2; j++) {
                float v[size];
                unpack<T>(own_x[k][j], xhat[j]);
                unpack<T>(w[j], v);
                for (int i = 0; i < size; i++) {
                    xhat[j][i] *= r[k];
                    dweight[j][i] += g[j][i] * xhat[j][i];
                    g[j][i] *= v[i];
                    dot += g[j][i] * xhat[j][i];
                }
            }
            const float mean = lanes_sum(dot, lanes) * scale;
            for (int j = 0; j < 2; j++) {
                for (int i = 0; i < size; i++) g[j][i] = r[k] * (g[j][i] - xhat[j][i] * mean);
                if (inside && p.group + k * groups < NH)
                    store128(to + k * groups * dx.stride_h + j * part.half, pack<T>(g[j]));
            }
        }
    }
    // The heads of a warp, then the warps of the block. A row of sums has lane after lane of a head.
    float* const sums = reinterpret_cast<float*>(dynamic_shared_memory());
    constexpr int own = 2 * size;
    float values[own];
    for (int i = 0; i < own; i++) values[i] = dweight[i / size][i % size];
    write_lane_sums(sums + warp_index() * HD + part.lane * own, values, warp_size / 2, lanes);
    __syncthreads();
    for (unsigned at = threadIdx.x; at < HD; at += blockDim.x) {
        float sum = 0;
#pragma unroll 8
        for (unsigned warp = 0; warp < blockDim.x / warp_size; warp++) sum += sums[warp * HD + at];
        const unsigned channel = at / size % 2 * part.half + at / own * size + at % size;
        partial[int64_t{blockIdx.x} * HD + channel] = sum;
    }
}

template <class G>
__global__ void qk_norm_rope_backward_vectorized_kernel_columns(Dependent<G*> dweight_,
                                                                Dependent<const float*> partial_, int rows,
                                                                int64_t HD, bool accumulate) {
    const auto [dweight, partial] = start_next_and_wait(dweight_, partial_);
    sum_columns(dweight, partial, rows, HD, accumulate);
}

// Whether the operands that are strided, weight and cis are whole vectors, and a head is a power of two of lanes of a warp, at
// least two.
bool heads_fit_lanes(const Call& call) {
    const int size = static_cast<int>(16 / size_of(call.tensor[0].dtype));
    const int64_t HD = call["HD"], lanes = HD / size;
    bool whole =
        has_few_heads(call) && is_whole({call.operand("weight").data, call.operand("cis").data}, HD, size);
    for (size_t i = 0; i < call.op->operands.size(); i++) {
        if (!call.op->operands[i].strided) continue;
        const Tensor& heads = call.tensor[i];
        whole &= is_whole({heads.data}, heads.stride[0] | heads.stride[1] | heads.stride[2], size);
    }
    return whole && lanes >= 2 && (lanes & (lanes - 1)) == 0 && lanes <= device_properties().warp_size;
}
constexpr Constraints heads_fit{
    "heads of 32 bytes to 16 a lane of the warp, a power of two, that begin at multiples of 16 bytes; "
    "fewer than 2^31 heads",
    heads_fit_lanes};

template <class T>
void qk_norm_rope_forward_vectorized(View<T, 4> out, View<float, 3> rstd, View<const T, 4> x,
                                     View<const T, 1> weight, View<const float, 3> cis, double eps,
                                     LaunchContext context) {
    const int64_t positions = x.shape[0] * x.shape[1], NH = x.shape[2];
    const int64_t lanes = x.shape[3] / (2 * vector_size<T>);
    const unsigned groups = blocks_for(NH, forward_heads);
    launch(context.grid(positions * groups * lanes),
           cis ? qk_norm_rope_forward_vectorized_kernel<T, true>
               : qk_norm_rope_forward_vectorized_kernel<T, false>,
           heads(out), rstd.data, heads(x), weight.data, cis.data, positions, x.shape[1], NH, lanes, groups,
           eps);
}

// As many blocks as are resident, with equal shares.
int backward_blocks(int64_t positions, int64_t NH, int64_t lanes, int threads) {
    const int64_t steps = blocks_for(positions * blocks_for(NH, backward_heads), threads / lanes);
    const int64_t resident = int64_t{device_properties().multiprocessors} * (backward_threads / threads);
    return static_cast<int>(blocks_for(steps, blocks_for(steps, resident)));
}
int64_t backward_workspace(const Call& c) {
    const int64_t lanes = c["HD"] * size_of(c.operand("x").dtype) / 32;
    return int64_t{backward_blocks(c["B"] * c["T"], c["NH"], lanes, c.launch.threads)} * c["HD"] * 4;
}

template <class T, class G>
void qk_norm_rope_backward_vectorized(View<T, 4> dx, View<G, 1> dweight, View<const T, 4> dout,
                                      View<const T, 4> x, View<const T, 1> weight, View<const float, 3> rstd,
                                      View<const float, 3> cis, bool accumulate, LaunchContext context) {
    const int64_t positions = x.shape[0] * x.shape[1], NH = x.shape[2], HD = x.shape[3];
    const int64_t lanes = HD / (2 * vector_size<T>);
    const int blocks = backward_blocks(positions, NH, lanes, context.threads);
    float* const partial = static_cast<float*>(context.workspace);
    const int warps = context.threads / device_properties().warp_size;
    launch(Grid(blocks, context.threads, context.stream, static_cast<size_t>(warps * HD) * sizeof(float)),
           cis ? qk_norm_rope_backward_vectorized_kernel<T, true>
               : qk_norm_rope_backward_vectorized_kernel<T, false>,
           heads(dx), partial, heads(dout), heads(x), weight.data, rstd.data, cis.data, positions,
           std::max<int64_t>(x.shape[1], 1), NH, lanes, blocks_for(NH, backward_heads));
    launch(columns_grid(HD, context.stream), qk_norm_rope_backward_vectorized_kernel_columns<G>, dweight.data,
           partial, blocks, HD, accumulate);
}

Operation qk_norm_rope_forward(
    "qk_norm_rope_forward<T: f32 bf16 fp16 f64, A: arithmetic(T)>"
    "(out: T[B,T,NH,HD] strided may_share(x), rstd: A[B,T,NH];"
    " x: T[B,T,NH,HD] strided, weight: T[HD], cis?: A[T,HD/2,2]; eps: float {1e-5, 1e-6}) empty(B, T)"
    " test(B=1, T=65, NH=5, HD=128)"
    " derivative qk_norm_rope_backward(dx: grad x, dweight: grad weight;"
    " dout: grad out, x, weight, rstd, cis)",
    "RMSNorm of every head, then RoPE where cis is given",
    {{"cpu", "positions over threads", instantiations<LLAMAC_FLOATS(qk_norm_rope_forward_cpu)>()},
     {"vectorized", "neighboring lanes have whole heads, 128-bit accesses",
      instantiations<LLAMAC_KERNELS(qk_norm_rope_forward_vectorized)>(), heads_fit,
      blocks_of(128, forward_threads)},
     {"naive", "one thread per head", instantiations<LLAMAC_KERNELS(qk_norm_rope_forward_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(qk_norm_rope_forward_reference),
                     qk_norm_rope_forward_reference<double>>()}},
    [](const Call& c) { return 7.0 * c["B"] * c["T"] * c["NH"] * c["HD"]; });

Operation qk_norm_rope_backward(
    "qk_norm_rope_backward<T: f32 bf16 fp16 f64, A: arithmetic(T), G: f32 bf16 f64>"
    "(dx: T[B,T,NH,HD] strided may_share(dout), dweight: G[HD] adds_if(accumulate);"
    " dout: T[B,T,NH,HD] strided, x: T[B,T,NH,HD] strided, weight: T[HD], rstd: A[B,T,NH],"
    " cis?: A[T,HD/2,2]; accumulate: bool) empty(B, T) test(B=1, T=65, NH=5, HD=128)",
    "gradients of qk_norm_rope_forward",
    {{"cpu", "heads over threads; dweight by blocks of heads",
      instantiations<LLAMAC_FLOATS(qk_norm_rope_backward_cpu, float),
                     qk_norm_rope_backward_cpu<bf16, bf16>>()},
     {"vectorized",
      "neighboring lanes have whole heads, 128-bit accesses, dweight as one partial row per block",
      instantiations<LLAMAC_KERNELS(qk_norm_rope_backward_vectorized, float),
                     qk_norm_rope_backward_vectorized<bf16, bf16>>(),
      heads_fit, blocks_of(512, 256, 128), backward_workspace},
     {"naive", "one thread per head, one thread per channel for dweight",
      instantiations<LLAMAC_KERNELS(qk_norm_rope_backward_naive, float),
                     qk_norm_rope_backward_naive<bf16, bf16>>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(qk_norm_rope_backward_reference, float),
                     qk_norm_rope_backward_reference<bf16, bf16>,
                     qk_norm_rope_backward_reference<double, double>>()}},
    [](const Call& c) { return 13.0 * c["B"] * c["T"] * c["NH"] * c["HD"]; });

}  // namespace
}  // namespace llamac
