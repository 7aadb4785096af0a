// Quantization for matrix products in fp8 (core/fp8.h), with scales of their own for rows and for columns.
//
//   row[n]    = the largest power of two with max_c |x[n,c]| * row[n] <= limit,     inverse[n] = 1 / row[n]
//   column[c] = the largest power of two with max_n |x[n,c]| * column[c] <= limit,  inverse_transposed[c] = 1 / column[c]
//   out[n,c]  = round(x[n,c] * row[n]);  transposed[c,n] = round(x[n,c] * column[c]);  both saturate
//   saturated += the number of elements with |x[n,c] * row[n]| beyond the largest value
//
// A scale is 1 where the maximum is 0, infinite or NaN. A product takes its operands' scales out of the sum, so they may not
// change along the summed dimension: codes that are summed along columns have a scale per row, and the transposed codes have
// scales of their own. out, transposed and saturated may be null. Maxima and counts do not depend on the order of threads.
//
// reference:  plain loops.
// cpu:        rows over threads.
// naive:      one thread per row and per column, then one per element.
// vectorized: tiles as those of quantize: one pass for the maxima, by atomics where tiles meet, and one for the codes.
#include <cfloat>

#include "ops/quantize.h"

namespace llamac {
namespace {

// 1 / scale of values whose largest size is this. A power of two: its own inverse is exact, too.
template <class A>
__host__ __device__ inline A inverse_scale(A largest, double limit) {
    const float size = static_cast<float>(largest);
    if (!(size > 0 && size <= FLT_MAX)) return 1;
    return A(1.0f / fp8_scale(size, static_cast<float>(limit)));
}

template <class T, class Q>
void quantize_rows_reference(View<Q, 2> out, View<Q, 2> transposed, View<arithmetic<T>, 1> inverse,
                             View<arithmetic<T>, 1> inverse_transposed, View<int32_t, 1> saturated,
                             View<const T, 2> x, double limit) {
    using A = arithmetic<T>;
    const int64_t N = x.shape[0], C = x.shape[1];
    const auto larger = [](A a, A b) { return a != a || a > b ? a : b; };
    for (int64_t n = 0; n < N; n++) {
        A largest = 0;
        for (int64_t c = 0; c < C; c++) largest = larger(largest, std::abs(A(x(n, c))));
        inverse(n) = inverse_scale(largest, limit);
    }
    for (int64_t c = 0; c < C; c++) {
        A largest = 0;
        for (int64_t n = 0; n < N; n++) largest = larger(largest, std::abs(A(x(n, c))));
        inverse_transposed(c) = inverse_scale(largest, limit);
    }
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) {
            const A value = A(x(n, c)) * (1 / inverse(n));
            if (saturated && std::abs(double(value)) > largest_value<Q>) saturated(0)++;
            if (out) out(n, c) = to_storage<Q>(value);
            if (transposed) transposed(c, n) = to_storage<Q>(A(x(n, c)) * (1 / inverse_transposed(c)));
        }
}

// ---- cpu

// Sizes are compared as bits, which are in the sizes' order; NaN is above all.
__host__ __device__ inline uint32_t size_bits(float value) {
    union {
        float f;
        uint32_t u;
    } v{value};
    return v.u & 0x7fffffffu;
}

template <class T>
void largest_cpu(float* rows, float* columns, const T* x, int64_t N, int64_t C, double limit) {
    std::vector<uint32_t> of_columns(static_cast<size_t>(C));
#pragma omp parallel
    {
        std::vector<uint32_t> own(static_cast<size_t>(C));
#pragma omp for
        for (int64_t n = 0; n < N; n++) {
            uint32_t of_row = 0;
            for (int64_t c = 0; c < C; c++) {
                const uint32_t size = size_bits(float(x[n * C + c]));
                of_row = std::max(of_row, size);
                own[c] = std::max(own[c], size);
            }
            rows[n] = inverse_scale(std::bit_cast<float>(of_row), limit);
        }
#pragma omp critical
        for (size_t c = 0; c < own.size(); c++) of_columns[c] = std::max(of_columns[c], own[c]);
    }
    for (size_t c = 0; c < of_columns.size(); c++)
        columns[c] = inverse_scale(std::bit_cast<float>(of_columns[c]), limit);
}

template <class T, class Q>
void quantize_rows_cpu(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> inverse,
                       View<float, 1> inverse_transposed, View<int32_t, 1> saturated, View<const T, 2> x,
                       double limit) {
    const int64_t N = x.shape[0], C = x.shape[1];
    largest_cpu(inverse.data, inverse_transposed.data, x.data, N, C, limit);
    int32_t beyond = 0;
#pragma omp parallel for reduction(+ : beyond)
    for (int64_t n = 0; n < N; n++) {
        const float scale = 1 / inverse(n);
        for (int64_t c = 0; c < C; c++) {
            const float scaled = float(x(n, c)) * scale;
            beyond += std::abs(scaled) > Q::largest;
            if (out) out(n, c) = Q(scaled);
        }
    }
    if (saturated) saturated(0) += beyond;
    if (!transposed) return;
#pragma omp parallel for
    for (int64_t c0 = 0; c0 < C; c0 += host_tile)
        for (int64_t n = 0; n < N; n++)
            for (int64_t c = c0; c < std::min(c0 + host_tile, C); c++)
                transposed(c, n) = Q(float(x(n, c)) * (1 / inverse_transposed(c)));
}

// ---- naive

// One thread per row, then one per column.
template <class T>
__global__ void quantize_rows_naive_kernel_scales(float* inverse, float* inverse_transposed, const T* x,
                                                  int64_t N, int64_t C, double limit) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= N + C) return;
    const bool row = i < N;
    uint32_t largest = 0;
    for (int64_t k = 0; k < (row ? C : N); k++) {
        const uint32_t size = size_bits(float(row ? x[i * C + k] : x[k * C + i - N]));
        largest = size > largest ? size : largest;
    }
    (row ? inverse[i] : inverse_transposed[i - N]) = inverse_scale(__uint_as_float(largest), limit);
}

template <class T, class Q>
__global__ void quantize_rows_naive_kernel(Q* out, Q* transposed, const float* inverse,
                                           const float* inverse_transposed, int32_t* saturated, const T* x,
                                           int64_t N, int64_t C) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, n = i / C, c = i % C;
    if (n >= N) return;
    const float value = float(x[i]), scaled = value * (1 / inverse[n]);
    if (saturated && fabsf(scaled) > Q::largest) atomicAdd(saturated, 1);
    if (out) out[i] = Q(scaled);
    if (transposed) transposed[c * N + n] = Q(value * (1 / inverse_transposed[c]));
}

template <class T, class Q>
void quantize_rows_naive(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> inverse,
                         View<float, 1> inverse_transposed, View<int32_t, 1> saturated, View<const T, 2> x,
                         double limit, LaunchContext context) {
    const int64_t N = x.shape[0], C = x.shape[1];
    launch(context.grid(N + C), quantize_rows_naive_kernel_scales<T>, inverse.data, inverse_transposed.data,
           x.data, N, C, limit);
    launch(context.grid(N * C), quantize_rows_naive_kernel<T, Q>, out.data, transposed.data, inverse.data,
           inverse_transposed.data, saturated.data, x.data, N, C);
}

// ---- vectorized: tiles

constexpr int rows_per_pass = quantize_side / quantize_passes,
              row_groups = quantize_threads / quantize_across;

// rows, columns: bits of sizes, 0 at first.
template <class T>
__global__ void __launch_bounds__(quantize_threads)
    quantize_rows_vectorized_kernel_largest(uint32_t* rows, uint32_t* columns, const T* x, int64_t N,
                                            int64_t C, unsigned across) {
    struct Shared {
        uint32_t columns[row_groups][quantize_side];
    };
    Shared& shared = shared_memory<Shared>();
    const int64_t n0 = int64_t{blockIdx.x / across} * quantize_side,
                  c0 = int64_t{blockIdx.x % across} * quantize_side;
    const int group = static_cast<int>(threadIdx.x) / quantize_across,
              column = static_cast<int>(threadIdx.x) % quantize_across * quantize_columns;
    uint32_t of_columns[quantize_columns] = {};
#pragma unroll
    for (int i = 0; i < quantize_side / row_groups; i++) {
        const int64_t n = n0 + i * row_groups + group, c = c0 + column;
        float v[quantize_columns] = {};
        if (n < N && c < C) unpack_eight<T>(load_eight(x + n * C + c), v);
        uint32_t of_row = 0;
        for (int k = 0; k < quantize_columns; k++) {
            const uint32_t size = size_bits(v[k]);
            of_row = size > of_row ? size : of_row;
            of_columns[k] = size > of_columns[k] ? size : of_columns[k];
        }
        for (int distance = quantize_across / 2; distance > 0; distance /= 2) {
            const uint32_t other = __shfl_xor(of_row, distance);
            of_row = other > of_row ? other : of_row;
        }
        if (column == 0 && n < N) atomicMax(rows + n, of_row);
    }
    for (int k = 0; k < quantize_columns; k++) shared.columns[group][column + k] = of_columns[k];
    __syncthreads();
    const int own = static_cast<int>(threadIdx.x);
    if (own >= quantize_side || c0 + own >= C) return;
    uint32_t largest = 0;
    for (int g = 0; g < row_groups; g++)
        largest = shared.columns[g][own] > largest ? shared.columns[g][own] : largest;
    atomicMax(columns + c0 + own, largest);
}

// Replaces the bits of sizes.
__global__ void quantize_rows_vectorized_kernel_scales(float* inverse, float* inverse_transposed, int64_t N,
                                                       int64_t C, double limit) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= N + C) return;
    float& own = i < N ? inverse[i] : inverse_transposed[i - N];
    own = inverse_scale(own, limit);
}

template <class T, class Q>
__global__ void __launch_bounds__(quantize_threads)
    quantize_rows_vectorized_kernel(QuantizedData<Q> to, const float* inverse,
                                    const float* inverse_transposed, const T* x, unsigned across) {
    struct Shared {
        uint32_t turned[quantize_side * quantize_words];
    };
    Shared& shared = shared_memory<Shared>();
    const int64_t n0 = int64_t{blockIdx.x / across} * quantize_side,
                  c0 = int64_t{blockIdx.x % across} * quantize_side;
    const int column = static_cast<int>(threadIdx.x) % quantize_across * quantize_columns;
    const int first_row = static_cast<int>(threadIdx.x) / quantize_across * quantize_rows_at_once;
    const int64_t c = c0 + column;
    float of_columns[quantize_columns] = {};
    if (to.transposed && c < to.C)
        for (int k = 0; k < quantize_columns; k++) of_columns[k] = 1 / inverse_transposed[c + k];
    int beyond = 0;
    uint32_t words[quantize_passes][2][quantize_rows_at_once] = {};
#pragma unroll
    for (int pass = 0; pass < quantize_passes; pass++) {
#pragma unroll
        for (int r = 0; r < quantize_rows_at_once; r++) {
            const int64_t n = n0 + first_row + pass * rows_per_pass + r;
            if (n >= to.N || c >= to.C) continue;
            float v[quantize_columns];
            unpack_eight<T>(load_eight(x + n * to.C + c), v);
            const float scale = 1 / inverse[n];
            float scaled[quantize_columns];
            for (int k = 0; k < quantize_columns; k++) {
                scaled[k] = v[k] * scale;
                beyond += fabsf(scaled[k]) > Q::largest;
                v[k] *= of_columns[k];
            }
            if (to.out)
                store_vector(reinterpret_cast<uint2*>(to.out + n * to.C + c),
                             make_uint2(pack_fp8<Q>(scaled), pack_fp8<Q>(scaled + 4)));
            words[pass][0][r] = pack_fp8<Q>(v);
            words[pass][1][r] = pack_fp8<Q>(v + 4);
        }
    }
    if (to.saturated && beyond) atomicAdd(to.saturated, beyond);
    if (!to.transposed) return;
#pragma unroll
    for (int pass = 0; pass < quantize_passes; pass++)
        put_turned(shared.turned, column, first_row + pass * rows_per_pass, words[pass]);
    __syncthreads();
    store_turned(to, shared.turned, n0, c0, to.C);
}

template <class T, class Q>
void quantize_rows_vectorized(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> inverse,
                              View<float, 1> inverse_transposed, View<int32_t, 1> saturated,
                              View<const T, 2> x, double limit, LaunchContext context) {
    const int64_t N = x.shape[0], C = x.shape[1];
    const Grid tiles = tile_grid(N, C, 1, context.stream);
    CHECK(hipMemsetAsync(inverse.data, 0, static_cast<size_t>(N) * sizeof(float), context.stream));
    CHECK(hipMemsetAsync(inverse_transposed.data, 0, static_cast<size_t>(C) * sizeof(float), context.stream));
    launch(tiles, quantize_rows_vectorized_kernel_largest<T>, reinterpret_cast<uint32_t*>(inverse.data),
           reinterpret_cast<uint32_t*>(inverse_transposed.data), x.data, N, C, tiles_across(C, 1));
    launch(Grid(blocks_for(N + C, quantize_threads), quantize_threads, context.stream),
           quantize_rows_vectorized_kernel_scales, inverse.data, inverse_transposed.data, N, C, limit);
    launch(tiles, quantize_rows_vectorized_kernel<T, Q>,
           data_of<Q>({out, transposed, View<float, 1>{}, saturated}, N, C), inverse.data,
           inverse_transposed.data, x.data, tiles_across(C, 1));
}

constexpr Constraints whole_vectors{
    "C and, beside transposed, N multiples of 16, operands aligned to 16 bytes",
    [](const Call& c) { return tiles_fit(c, c["N"], c["C"], {"x"}); }};

Operation quantize_rows(
    "quantize_rows<T: f32 bf16 f64, A: arithmetic(T), Q: e4m3 e5m2 e4m3fnuz e5m2fnuz f64>"
    "(out?: Q[N,C], transposed?: Q[C,N], inverse: A[N], inverse_transposed: A[C], saturated?~: i32[1] >0;"
    " x: T[N,C]; limit: float {240, 0.5})"
    " test(N=160, C=144) test(N=16, C=272) test_large(N=1040, C=2064)",
    "fp8 of x with a scale per row, and transposed with a scale per column",
    {{"cpu", "rows over threads", instantiations<LLAMAC_QUANTIZE(quantize_rows_cpu)>()},
     {"vectorized", "tiles turned in registers and LDS, 128-bit accesses",
      instantiations<LLAMAC_QUANTIZE(quantize_rows_vectorized)>(), whole_vectors,
      blocks_of(quantize_threads)},
     {"naive", "one thread per row and column, then per element",
      instantiations<LLAMAC_QUANTIZE(quantize_rows_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_QUANTIZE(quantize_rows_reference), quantize_rows_reference<double, double>>()}},
    [](const Call& c) { return 1.0 * c["N"] * c["C"]; });

}  // namespace
}  // namespace llamac
