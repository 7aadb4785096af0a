// Quantisation for matrix products in fp8 (core/fp8.h), with one scale per tensor.
//
//   quantize:       out[n,c] = transposed[c,n] = round(x[n,c] * scale), saturating
//                   amax = max(amax, max |x|);  saturated += the number of elements beyond the largest value
//   update_scales:  scale[p] = the largest power of two with amax[p] * scale[p] <= limit[p];  inverse[p,0] = 1 / scale[p];
//                   amax[p] = 0
//                   scale and inverse stay as they are where amax is 0, infinite or NaN. Products read inverse, and the
//                   vendors' libraries want its address to be a multiple of 16 bytes.
//
// A product sums along neighbours in memory of both operands. So the gradient of a weight needs both of its operands
// transposed, and the gradient of an input needs the weight transposed.
//
// With delayed scaling, scale comes from the maxima of the optimizer step before, and one pass does it all. With current
// scaling, a first call takes the maximum alone, update_scales follows, and a second call writes. Any output may be null.
// A NaN in x makes amax NaN, whatever else is there. Maxima and counts do not depend on the order of threads.
//
// reference:  plain loops.
// cpu:        tiles over threads.
// naive:      one thread per element.
// vectorized: a block has a tile of 128 x 128; 128-bit accesses on all sides. What is transposed is turned four by four in
//             registers, and as words in LDS, whose places are chosen so that neither writes nor reads meet in a bank.
//
// Measured in training: docs/fp8.md.
#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>

#include "core/device.h"
#include "core/operation.h"

namespace llamac {
namespace {

template <class Q>
constexpr double largest_value = Q::largest;
template <>
constexpr double largest_value<double> = std::numeric_limits<double>::infinity();

template <class T, class Q>
void quantize_reference(View<Q, 2> out, View<Q, 2> transposed, View<arithmetic<T>, 1> amax,
                        View<int32_t, 1> saturated, View<const T, 2> x, View<const arithmetic<T>, 1> scale) {
    using A = arithmetic<T>;
    for (int64_t n = 0; n < x.shape[0]; n++)
        for (int64_t c = 0; c < x.shape[1]; c++) {
            const A size = std::abs(A(x(n, c))), value = A(x(n, c)) * scale(0);
            if (amax && !(size <= amax(0)) && amax(0) == amax(0)) amax(0) = size;
            if (saturated && std::abs(double(value)) > largest_value<Q>) saturated(0)++;
            if (out) out(n, c) = to_storage<Q>(value);
            if (transposed) transposed(c, n) = to_storage<Q>(value);
        }
}

constexpr int64_t host_tile = 64;

// A tile of out or transposed from rows of codes.
template <class Q>
void copy_tile(View<Q, 2> to, int64_t row, int64_t column, int64_t rows, int64_t columns,
               const Q (&from)[host_tile][host_tile]) {
    for (int64_t r = 0; r < rows; r++) std::copy_n(from[r], columns, &to(row + r, column));
}

template <class T, class Q>
void quantize_cpu(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> amax, View<int32_t, 1> saturated,
                  View<const T, 2> x, View<const float, 1> scale) {
    const int64_t N = x.shape[0], C = x.shape[1], across = (C + host_tile - 1) / host_tile;
    const int64_t tiles = (N + host_tile - 1) / host_tile * across;
    const float s = scale(0);
    uint32_t largest = 0;  // of the bits of sizes, which are in the sizes' order; NaN is above all
    int32_t beyond = 0;
#pragma omp parallel for reduction(max : largest) reduction(+ : beyond)
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t n0 = tile / across * host_tile, c0 = tile % across * host_tile;
        const int64_t rows = std::min(host_tile, N - n0), columns = std::min(host_tile, C - c0);
        Q codes[host_tile][host_tile], turned[host_tile][host_tile];
        for (int64_t n = 0; n < rows; n++)
            for (int64_t c = 0; c < columns; c++) {
                const float value = float(x(n0 + n, c0 + c)), scaled = value * s;
                largest = std::max(largest, std::bit_cast<uint32_t>(std::abs(value)));
                beyond += std::abs(scaled) > Q::largest;
                codes[n][c] = turned[c][n] = Q(scaled);
            }
        if (out) copy_tile(out, n0, c0, rows, columns, codes);
        if (transposed) copy_tile(transposed, c0, n0, columns, rows, turned);
    }
    if (amax) amax(0) = std::bit_cast<float>(std::max(largest, std::bit_cast<uint32_t>(amax(0))));
    if (saturated) saturated(0) += beyond;
}

// ---- naive

template <class T, class Q>
__global__ void quantize_naive_kernel(Q* out, Q* transposed, float* amax, int32_t* saturated, const T* x,
                                      const float* scale, int64_t N, int64_t C) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= N * C) return;
    const float value = float(x[i]), scaled = value * *scale;
    if (amax) atomicMax(reinterpret_cast<unsigned*>(amax), __float_as_uint(fabsf(value)));
    if (saturated && fabsf(scaled) > Q::largest) atomicAdd(saturated, 1);
    if (out) out[i] = Q(scaled);
    if (transposed) transposed[i % C * N + i / C] = Q(scaled);
}

template <class T, class Q>
void quantize_naive(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> amax, View<int32_t, 1> saturated,
                    View<const T, 2> x, View<const float, 1> scale, LaunchContext context) {
    const int64_t N = x.shape[0], C = x.shape[1];
    launch(Grid(blocks_for(N * C, context.threads), context.threads, context.stream),
           quantize_naive_kernel<T, Q>, out.data, transposed.data, amax.data, saturated.data, x.data,
           scale.data, N, C);
}

// ---- vectorized: tiles, 128-bit accesses

// A thread has 8 columns of 4 neighbouring rows, `passes` times: a word of the transposed tile is 4 rows of a column.
constexpr int tile = 128, block_threads = 256, columns_per_thread = 8, rows_per_thread = 4;
constexpr int threads_across = tile / columns_per_thread;
constexpr int passes = tile / (block_threads / threads_across * rows_per_thread);
constexpr int row_words = tile / 4;

// One place for both: with more than 16 KiB, four blocks would not fit in the LDS of MI300X.
union QuantizeShared {
    uint32_t turned[tile * row_words];  // a row per column of the tile
    float warps[most_warps];
};
// Where word w of column c lies. Threads that write at once have 16 values of c / 8 and two neighbouring values of w;
// threads that read at once have all words of a column, four by four.
__device__ inline int word_place(int c, int w) {
    return c * row_words + (w ^ (c / columns_per_thread * 2 % row_words));
}

template <class T>
__device__ inline void load_columns(const T* x, float (&values)[columns_per_thread]) {
#pragma unroll
    for (int first = 0; first < columns_per_thread; first += vector_size<T>) {
        float part[vector_size<T>];
        unpack(load128(x + first), part);
        for (int i = 0; i < vector_size<T>; i++) values[first + i] = part[i];
    }
}

// Four words of four bytes each, turned: word i of the result has byte i of each.
__device__ inline void turn(uint32_t (&w)[4]) {
    const uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
    const uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, b, 0x5410);
    w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410);
    w[3] = __byte_perm(c, d, 0x7632);
}

// Writes the tile's columns as rows of [C,N] from (c0, n0) on: 16 bytes per access, a whole row per 8 threads.
template <class Q>
__device__ void store_turned(Q* transposed, const uint32_t* turned, int64_t n0, int64_t c0, int64_t N,
                             int64_t C) {
    constexpr int lanes = row_words / 4;
    for (int i = static_cast<int>(threadIdx.x); i < tile * lanes; i += block_threads) {
        const int c = i / lanes, w = i % lanes * 4;
        if (c0 + c >= C || n0 + 4 * w >= N) continue;
        const int place = word_place(c, w), swapped = place % 4;  // 0 or 2
        const uint4 bits = *reinterpret_cast<const uint4*>(turned + place - swapped);
        store128(transposed + (c0 + c) * N + n0 + 4 * w,
                 swapped ? make_uint4(bits.z, bits.w, bits.x, bits.y) : bits);
    }
}

template <class T, class Q>
__global__ void __launch_bounds__(block_threads)
    quantize_vectorized_kernel(Dependent<Q*> out_, Dependent<Q*> transposed_, Dependent<float*> amax_,
                               Dependent<int32_t*> saturated_, Dependent<const T*> x_,
                               Dependent<const float*> scale_, int64_t N, int64_t C, unsigned across) {
    const auto [out, transposed, amax, saturated, x, scale] =
        wait(out_, transposed_, amax_, saturated_, x_, scale_);
    QuantizeShared& shared = shared_memory<QuantizeShared>();
    const int64_t n0 = int64_t{blockIdx.x / across} * tile, c0 = int64_t{blockIdx.x % across} * tile;
    const int column = static_cast<int>(threadIdx.x) % threads_across * columns_per_thread;
    const int first_row = static_cast<int>(threadIdx.x) / threads_across * rows_per_thread;
    const float s = *scale;
    float largest = 0;
    bool invalid = false;
    int beyond = 0;
#pragma unroll
    for (int pass = 0; pass < passes; pass++) {
        const int row = first_row + pass * (tile / passes);
        if (n0 + row >= N || c0 + column >= C) continue;
        const int64_t rows_left = N - n0 - row;
        uint32_t words[2][rows_per_thread];
#pragma unroll
        for (int r = 0; r < rows_per_thread; r++) {
            if (r >= rows_left) continue;  // nothing is transposed then
            const int64_t at = (n0 + row + r) * C + c0 + column;
            float v[columns_per_thread];
            load_columns(x + at, v);
            for (int i = 0; i < columns_per_thread; i++) {
                largest = fmaxf(largest, fabsf(v[i]));
                invalid |= v[i] != v[i];
                v[i] *= s;
                beyond += fabsf(v[i]) > Q::largest;
            }
            for (int half = 0; half < 2; half++) words[half][r] = pack_fp8<Q>(v + 4 * half);
            if (out) store_vector(reinterpret_cast<uint2*>(out + at), make_uint2(words[0][r], words[1][r]));
        }
        if (!transposed) continue;
        for (int half = 0; half < 2; half++) {
            turn(words[half]);
            for (int i = 0; i < 4; i++)
                shared.turned[word_place(column + 4 * half + i, row / 4)] = words[half][i];
        }
    }
    if (saturated && beyond) atomicAdd(saturated, beyond);
    if (amax && invalid) atomicMax(reinterpret_cast<unsigned*>(amax), 0x7fc00000u);
    __syncthreads();
    if (transposed) store_turned(transposed, shared.turned, n0, c0, N, C);
    if (!amax) return;
    __syncthreads();  // the turned tile is read
    largest = block_max(largest, shared.warps);
    if (threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned*>(amax), __float_as_uint(largest));
}

template <class T, class Q>
void quantize_vectorized(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> amax,
                         View<int32_t, 1> saturated, View<const T, 2> x, View<const float, 1> scale,
                         LaunchContext context) {
    const int64_t N = x.shape[0], C = x.shape[1];
    const unsigned across = blocks_for(C, tile), down = blocks_for(N, tile);
    launch(Grid(blocks_for(int64_t{across} * down, 1), block_threads, context.stream),
           quantize_vectorized_kernel<T, Q>, out.data, transposed.data, amax.data, saturated.data, x.data,
           scale.data, N, C, across);
}

constexpr Constraints whole_vectors{
    "C and, beside transposed, N multiples of 16, operands aligned to 16 bytes", [](const Call& c) {
        return c["C"] % 16 == 0 && (c["N"] % 16 == 0 || !c.operand("transposed").data) &&
               is_whole({c.operand("out").data, c.operand("transposed").data, c.operand("x").data}, 0, 1);
    }};

// ---- update_scales

constexpr int64_t inverse_row = 4;

__host__ __device__ inline void update_scale(float* scale, float* inverse, float* amax, const float* limit,
                                             int64_t p) {
    const float largest = amax[p];
    if (largest > 0 && largest <= FLT_MAX) {
        scale[p] = fp8_scale(largest, limit[p]);
        inverse[p * inverse_row] = 1.0f / scale[p];
    }
    amax[p] = 0;
}

void update_scales_reference(View<float, 1> scale, View<float, 2> inverse, View<float, 1> amax,
                             View<const float, 1> limit) {
    for (int64_t p = 0; p < scale.shape[0]; p++)
        update_scale(scale.data, inverse.data, amax.data, limit.data, p);
}

__global__ void update_scales_naive_kernel(float* scale, float* inverse, float* amax, const float* limit,
                                           int64_t P) {
    const int64_t p = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (p < P) update_scale(scale, inverse, amax, limit, p);
}

void update_scales_naive(View<float, 1> scale, View<float, 2> inverse, View<float, 1> amax,
                         View<const float, 1> limit, LaunchContext context) {
    const int64_t P = scale.shape[0];
    launch(Grid(blocks_for(P, context.threads), context.threads, context.stream), update_scales_naive_kernel,
           scale.data, inverse.data, amax.data, limit.data, P);
}

// A launcher for each pair of types.
#define LLAMAC_QUANTIZE(LAUNCHER)                                                                       \
    LAUNCHER<float, e4m3>, LAUNCHER<float, e5m2>, LAUNCHER<float, e4m3fnuz>, LAUNCHER<float, e5m2fnuz>, \
        LAUNCHER<bf16, e4m3>, LAUNCHER<bf16, e5m2>, LAUNCHER<bf16, e4m3fnuz>, LAUNCHER<bf16, e5m2fnuz>

Operation quantize(
    "quantize<T: f32 bf16 f64, A: arithmetic(T), Q: e4m3 e5m2 e4m3fnuz e5m2fnuz f64>"
    "(out?: Q[N,C], transposed?: Q[C,N], amax?~: A[1] >0, saturated?~: i32[1] >0;"
    " x: T[N,C], scale: A[1] >0)"
    " test(N=160, C=144) test(N=16, C=272) test_large(N=1040, C=2064)",
    "fp8 of x * scale, transposed too, and the largest |x|",
    {{"cpu", "tiles over threads", Backend::host, instantiations<LLAMAC_QUANTIZE(quantize_cpu)>()},
     {"vectorized",
      "tiles turned in registers and LDS, 128-bit accesses",
      Backend::device,
      instantiations<LLAMAC_QUANTIZE(quantize_vectorized)>(),
      whole_vectors,
      {block_threads}},
     {"naive", "one thread per element", Backend::device, instantiations<LLAMAC_QUANTIZE(quantize_naive)>()},
     {"reference", "plain loops", Backend::host,
      instantiations<LLAMAC_QUANTIZE(quantize_reference), quantize_reference<double, double>>()}},
    [](const Call& c) { return 1.0 * c["N"] * c["C"]; });

Operation update_scales(
    "update_scales(scale~: f32[P] >0, inverse~: f32[P,4] >0, amax~: f32[P] >0; limit: f32[P] >0)",
    "scales of fp8 from the largest values, which begin anew",
    {{"naive", "one thread per element", Backend::device, instantiations<update_scales_naive>()},
     {"reference", "plain loops", Backend::host, instantiations<update_scales_reference>()}});

}  // namespace
}  // namespace llamac
