// Quantization to fp8 as the last part of other operations: of values that a kernel reads (quantize.hip) or makes
// (swiglu_quantize.hip and others). quantize.hip has the mathematics and the idea of each variant. Values that a kernel makes are
// rounded to their storage type first, so that codes, maximum and count are those of `quantize` of the stored tensor.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/device.h"
#include "core/operation.h"

namespace llamac {

// Outputs for values [N,C]: codes [N,C], transposed codes [C,N], amax, saturated count; each optional.
template <class Q, class A = float>
struct Quantized {
    View<Q, 2> out, transposed;
    View<A, 1> amax;
    View<int32_t, 1> saturated;
};

template <class Q>
constexpr double largest_value = Q::largest;
template <>
inline constexpr double largest_value<double> = std::numeric_limits<double>::infinity();

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

// Values [N,C] of an operation on their way to quantize_reference.
template <class T>
View<T, 2> rows_of(T* data, int64_t N, int64_t C) {
    return {data, {N, C}, {C, 1}};
}

// ---- cpu: blocks of rows over threads

constexpr int64_t host_tile = 64;

// A tile of out or transposed from rows of codes.
template <class Q>
void copy_tile(View<Q, 2> to, int64_t row, int64_t column, int64_t rows, int64_t columns,
               const Q (&from)[host_tile][host_tile]) {
    for (int64_t r = 0; r < rows; r++) std::copy_n(from[r], columns, &to(row + r, column));
}

// rows(n, count, memory): the first of rows n .. n+count of values, one behind another, which may lie in the thread's
// memory [count * C].
template <class T, class Q, class Rows>
void quantize_rows(const Quantized<Q>& to, float scale, int64_t N, int64_t C, const Rows& rows) {
    uint32_t largest = 0;  // of the bits of sizes, which are in the sizes' order; NaN is above all
    int32_t beyond = 0;
#pragma omp parallel reduction(max : largest) reduction(+ : beyond)
    {
        std::vector<T> memory(static_cast<size_t>(std::min(N, host_tile) * C));
#pragma omp for
        for (int64_t n0 = 0; n0 < N; n0 += host_tile) {
            const int64_t count = std::min(host_tile, N - n0);
            const T* const values = rows(n0, count, memory.data());
            for (int64_t c0 = 0; c0 < C; c0 += host_tile) {
                const int64_t columns = std::min(host_tile, C - c0);
                Q codes[host_tile][host_tile], turned[host_tile][host_tile];
                for (int64_t n = 0; n < count; n++)
                    for (int64_t c = 0; c < columns; c++) {
                        const float value = float(values[n * C + c0 + c]), scaled = value * scale;
                        largest = std::max(largest, std::bit_cast<uint32_t>(std::abs(value)));
                        beyond += std::abs(scaled) > Q::largest;
                        codes[n][c] = turned[c][n] = Q(scaled);
                    }
                if (to.out) copy_tile(to.out, n0, c0, count, columns, codes);
                if (to.transposed) copy_tile(to.transposed, c0, n0, columns, count, turned);
            }
        }
    }
    if (to.amax) to.amax(0) = std::bit_cast<float>(std::max(largest, std::bit_cast<uint32_t>(to.amax(0))));
    if (to.saturated) to.saturated(0) += beyond;
}

// ---- kernels

// Quantized as kernels see it. pitch: elements from a row of transposed to the next.
template <class Q>
struct QuantizedData {
    Q *out, *transposed;
    float* amax;
    int32_t* saturated;
    int64_t N, C, pitch;
};
template <class Q>
QuantizedData<Q> data_of(const Quantized<Q>& to, int64_t N, int64_t C) {
    return {to.out.data, to.transposed.data, to.amax.data, to.saturated.data, N, C, to.transposed.stride[0]};
}

// naive: element c of row n.
template <class Q>
__device__ void quantize_element(const QuantizedData<Q>& to, int64_t n, int64_t c, float value, float scale) {
    const float scaled = value * scale;
    if (to.amax) atomicMax(reinterpret_cast<unsigned*>(to.amax), __float_as_uint(fabsf(value)));
    if (to.saturated && fabsf(scaled) > Q::largest) atomicAdd(to.saturated, 1);
    if (to.out) to.out[n * to.C + c] = Q(scaled);
    if (to.transposed) to.transposed[c * to.pitch + n] = Q(scaled);
}

template <class T, class Q>
__global__ void quantize_naive_kernel(QuantizedData<Q> to, const T* x, const float* scale) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < to.N * to.C) quantize_element(to, i / to.C, i % to.C, float(x[i]), *scale);
}

// ---- vectorized: a block has a tile of 128 x 128

// A thread has 8 columns of 4 neighboring rows, `quantize_passes` times: a word of the transposed tile is 4 rows of a
// column.
constexpr int quantize_side = 128, quantize_threads = 256, quantize_columns = 8, quantize_rows_at_once = 4;
constexpr int quantize_across = quantize_side / quantize_columns;
constexpr int quantize_passes = quantize_side / (quantize_threads / quantize_across * quantize_rows_at_once);
constexpr int quantize_words = quantize_side / 4;  // of a column

// Whether a thread has registers to begin its loads ahead. On gfx942 a wave that waits for loads also waits for the stores before
// them.
constexpr bool has_registers_ahead = registers_in_full_block >= 128;

// One place for both: with more than 16 KiB, four blocks would not fit in the LDS of MI300X.
union QuantizeShared {
    uint32_t turned[quantize_side * quantize_words];  // a row per column of the tile
    float warps[max_warps];
};
// Where word w of column c lies. Threads that write at once have 16 values of c / 8 and two neighboring values of w;
// threads that read at once have all words of a column, four by four.
__device__ inline int word_place(int c, int w) {
    return c * quantize_words + (w ^ (c / quantize_columns * 2 % quantize_words));
}

// Eight neighboring values as they lie in memory.
template <class T>
struct Eight {
    uint4 bits[quantize_columns / vector_size<T>];
};
template <class T>
__device__ inline Eight<T> load_eight(const T* x) {
    Eight<T> e;
#pragma unroll
    for (int i = 0; i < quantize_columns / vector_size<T>; i++) e.bits[i] = load128(x + i * vector_size<T>);
    return e;
}
template <class T>
__device__ inline void unpack_eight(const Eight<T>& e, float (&values)[quantize_columns]) {
#pragma unroll
    for (int first = 0; first < quantize_columns; first += vector_size<T>) {
        float part[vector_size<T>];
        unpack<T>(e.bits[first / vector_size<T>], part);
        for (int i = 0; i < vector_size<T>; i++) values[first + i] = part[i];
    }
}
// As if they had been stored.
template <class T>
__device__ inline void round_eight(float (&values)[quantize_columns]) {
    if constexpr (narrow<T>) unpack<T>(pack<T>(values), values);
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
// Puts a thread's 8 columns of 4 rows, as codes of halves of rows, into the turned tile.
__device__ inline void put_turned(uint32_t* turned, int column, int row,
                                  uint32_t (&words)[2][quantize_rows_at_once]) {
    for (int half = 0; half < 2; half++) {
        turn(words[half]);
        for (int i = 0; i < 4; i++) turned[word_place(column + 4 * half + i, row / 4)] = words[half][i];
    }
}

// Writes the tile's columns as rows of `transposed` from (c0, n0) on: 16 bytes per access, a whole row per 8 threads. C: the
// end of the columns.
template <class Q>
__device__ void store_turned(const QuantizedData<Q>& to, const uint32_t* turned, int64_t n0, int64_t c0,
                             int64_t C) {
    constexpr int lanes = quantize_words / 4, chunks = quantize_side * lanes;
    constexpr int at_once = has_registers_ahead ? chunks / quantize_threads : 1;
    for (int first = static_cast<int>(threadIdx.x); first < chunks; first += at_once * quantize_threads) {
#pragma unroll
        for (int k = 0; k < at_once; k++) {
            const int i = first + k * quantize_threads, c = i / lanes, w = i % lanes * 4;
            if (c0 + c >= C || n0 + 4 * w >= to.N) continue;
            const int place = word_place(c, w), swapped = place % 4;  // 0 or 2
            const uint4 bits = *reinterpret_cast<const uint4*>(turned + place - swapped);
            store128(to.transposed + (c0 + c) * to.pitch + n0 + 4 * w,
                     swapped ? make_uint4(bits.z, bits.w, bits.x, bits.y) : bits);
        }
    }
}

// Maximum and counts of a thread.
struct Seen {
    float largest = 0;
    bool invalid = false;
    int beyond = 0;
};
template <class Q>
__device__ inline uint2 quantize_eight(float (&v)[quantize_columns], float scale, Seen& seen) {
    for (int i = 0; i < quantize_columns; i++) {
        seen.largest = fmaxf(seen.largest, fabsf(v[i]));
        seen.invalid |= v[i] != v[i];
        v[i] *= scale;
        seen.beyond += fabsf(v[i]) > Q::largest;
    }
    return make_uint2(pack_fp8<Q>(v), pack_fp8<Q>(v + 4));
}

// Blocks of quantize_threads; `across` of them hold 128 rows of a part. A source makes `parts` tiles at once, whose columns lie
// C / parts apart: fetch(n, c) loads the operands of eight values of each part from column c of row n on, and
// values(fetched, n, c, v) computes them. Always inlined: a call would keep its arguments in scratch. rows_in_flight fetches
// overlap; those of groups_ahead times as many rows more begin before these are used.
template <class Q, class Source>
__device__ __forceinline__ void quantize_tile(const QuantizedData<Q>& to, float scale, unsigned across,
                                              const Source& source) {
    constexpr int parts = Source::parts, rows = quantize_rows_at_once, in_flight = Source::rows_in_flight;
    QuantizeShared& shared = shared_memory<QuantizeShared>();
    const int64_t C = to.C / parts;
    const int64_t n0 = int64_t{blockIdx.x / across} * quantize_side,
                  c0 = int64_t{blockIdx.x % across} * quantize_side;
    const int column = static_cast<int>(threadIdx.x) % quantize_across * quantize_columns;
    const int first_row = static_cast<int>(threadIdx.x) / quantize_across * rows;
    const int64_t c = c0 + column;
    // A group: the rows that are fetched at once. `ahead` groups more are under way while one is computed.
    constexpr int of_pass = rows / in_flight, groups = quantize_passes * of_pass;
    constexpr int ahead = Source::groups_ahead < groups ? Source::groups_ahead : groups - 1;
    typename Source::Fetched fetched[ahead + 1][in_flight];
    const auto row_of = [&](int group) {
        return n0 + first_row + group / of_pass * (quantize_side / quantize_passes) +
               group % of_pass * in_flight;
    };
    const auto fetch = [&](int group) {
        const int64_t n = row_of(group), left = c < C ? to.N - n : 0;
#pragma unroll
        for (int r = 0; r < in_flight; r++)
            if (r < left) fetched[group % (ahead + 1)][r] = source.fetch(n + r, c);
    };
    Seen seen;
    uint32_t words[parts][quantize_passes][2][rows] = {};
#pragma unroll
    for (int group = 0; group < ahead; group++) fetch(group);
#pragma unroll
    for (int group = 0; group < groups; group++) {
        if constexpr (in_flight < rows) scheduling_barrier();  // else the fetches of all rows begin here
        if (group + ahead < groups) fetch(group + ahead);
        if constexpr (ahead > 0) scheduling_barrier();  // else they may begin after the group is computed
        const int64_t n = row_of(group), left = c < C ? to.N - n : 0;
#pragma unroll
        for (int r = 0; r < in_flight; r++) {
            if (r >= left) continue;  // nothing is transposed then
            float v[parts][quantize_columns];
            source.values(fetched[group % (ahead + 1)][r], n + r, c, v);
            for (int p = 0; p < parts; p++) {
                const uint2 codes = quantize_eight<Q>(v[p], scale, seen);
                const int at = group % of_pass * in_flight + r;
                words[p][group / of_pass][0][at] = codes.x;
                words[p][group / of_pass][1][at] = codes.y;
                if (to.out)
                    store_vector(reinterpret_cast<uint2*>(to.out + (n + r) * to.C + p * C + c), codes);
            }
        }
    }
    if (to.saturated && seen.beyond) atomicAdd(to.saturated, seen.beyond);
    if (to.amax && seen.invalid) atomicMax(reinterpret_cast<unsigned*>(to.amax), 0x7fc00000u);
#pragma unroll
    for (int p = 0; to.transposed && p < parts; p++) {
        if (p) __syncthreads();  // the tile of the part before is read
#pragma unroll
        for (int pass = 0; pass < quantize_passes; pass++)
            put_turned(shared.turned, column, first_row + pass * (quantize_side / quantize_passes),
                       words[p][pass]);
        __syncthreads();
        store_turned(to, shared.turned, n0, p * C + c0, (p + 1) * C);
    }
    if (!to.amax) return;
    __syncthreads();
    const float largest = block_max(seen.largest, shared.warps);
    if (threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned*>(to.amax), __float_as_uint(largest));
}

// A grid of quantize_tile for values [N,C] in so many parts.
inline unsigned tiles_across(int64_t C, int parts) {
    return blocks_for(C / parts, quantize_side);
}
inline Grid tile_grid(int64_t N, int64_t C, int parts, hipStream_t stream) {
    return Grid(blocks_for(int64_t{tiles_across(C, parts)} * blocks_for(N, quantize_side), 1),
                quantize_threads, stream);
}

// Whether the vectorized kernels take N rows of C columns per part: in whole 128-bit words, also of the inputs by these names.
inline bool tiles_fit(const Call& c, int64_t N, int64_t C, std::initializer_list<const char*> inputs) {
    const Tensor &out = c.operand("out"), &transposed = c.operand("transposed");
    bool fit = C % 16 == 0 && is_whole({out.data, transposed.data}, 0, 1);
    if (transposed.data) fit &= N % 16 == 0 && transposed.stride[0] % 16 == 0;
    for (const char* input : inputs) fit &= is_whole({c.operand(input).data}, 0, 1);
    return fit;
}

// A launcher for each pair of types.
#define LLAMAC_QUANTIZE(LAUNCHER)                                                                       \
    LAUNCHER<float, e4m3>, LAUNCHER<float, e5m2>, LAUNCHER<float, e4m3fnuz>, LAUNCHER<float, e5m2fnuz>, \
        LAUNCHER<bf16, e4m3>, LAUNCHER<bf16, e5m2>, LAUNCHER<bf16, e4m3fnuz>, LAUNCHER<bf16, e5m2fnuz>

}  // namespace llamac
