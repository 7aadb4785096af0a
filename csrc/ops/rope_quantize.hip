// The gradient of queries, keys and values as codes of fp8, for matrix products in fp8.
//
//   rope_backward_quantize:  quantize of dout, whose first `rotated` heads rope_backward (half split) has turned
//
// The turned gradient is rounded to the storage type, but never stored. The codes have the bits of the two operations one after
// the other (tests/ops/check_quantize.cpp).
//
// The variants are those of quantize, whose tiles they fill. vectorized: a thread also reads the other channels of its pairs,
// which belong to a thread of the same block if a head is no wider than a tile. Measured in training: docs/fp8.md.
#include "core/scratch.h"
#include "ops/quantize.h"
#include "ops/rope.h"

namespace llamac {
namespace {

// The columns of quantize are all channels of all heads.
template <class Q, class A = float>
Quantized<Q, A> side_by_side(View<Q, 3> out, View<Q, 3> transposed, View<A, 1> amax,
                             View<int32_t, 1> saturated, int64_t N, int64_t C) {
    return {rows_of(out.data, N, C), rows_of(transposed.data, C, N), amax, saturated};
}

// The first heads of rows of C channels, as rope_forward and rope_backward take them.
template <class T>
View<T, 4> first_heads(T* data, int64_t N, int64_t time, int64_t count, int64_t HD, int64_t C) {
    return {data, {N / time, time, count, HD}, {time * C, C, HD, 1}};
}

template <class T, class Q>
void rope_backward_quantize_reference(View<Q, 3> out, View<Q, 3> transposed, View<arithmetic<T>, 1> amax,
                                      View<int32_t, 1> saturated, View<const T, 3> dout,
                                      View<const arithmetic<T>, 3> cis, View<const arithmetic<T>, 1> scale,
                                      int64_t rotated) {
    const int64_t N = dout.shape[0], NH = dout.shape[1], HD = dout.shape[2], C = NH * HD;
    const int64_t time = cis.shape[0], count = std::min(rotated, NH);
    std::vector<T> values(dout.data, dout.data + N * C);
    rope_reference<T, -1>(first_heads(values.data(), N, time, count, HD, C),
                          first_heads(dout.data, N, time, count, HD, C), cis, false);
    const auto to = side_by_side(out, transposed, amax, saturated, N, C);
    quantize_reference<T, Q>(to.out, to.transposed, amax, saturated, rows_of<const T>(values.data(), N, C),
                             scale);
}

template <class T, class Q>
void rope_backward_quantize_cpu(View<Q, 3> out, View<Q, 3> transposed, View<float, 1> amax,
                                View<int32_t, 1> saturated, View<const T, 3> dout, View<const float, 3> cis,
                                View<const float, 1> scale, int64_t rotated) {
    const int64_t N = dout.shape[0], NH = dout.shape[1], HD = dout.shape[2], C = NH * HD;
    const int64_t time = cis.shape[0], count = std::min(rotated, NH), half = HD / 2;
    quantize_rows<T>(side_by_side(out, transposed, amax, saturated, N, C), scale(0), N, C,
                     [&](int64_t first, int64_t rows, T* memory) {
                         static thread_local Scratch own;
                         float *cosines = own.reserve<float>(HD), *sines = cosines + half;
                         std::copy_n(&dout(first, 0, 0), rows * C, memory);
                         for (int64_t n = 0; n < rows; n++) {
                             split_angles<-1>(&cis((first + n) % time, 0, 0), cosines, sines, half);
                             for (int64_t h = 0; h < count; h++)
                                 rotate_half_split(memory + n * C + h * HD, &dout(first + n, h, 0), cosines,
                                                   sines, half);
                         }
                         return memory;
                     });
}

// ---- naive

template <class T, class Q>
__global__ void rope_backward_quantize_naive_kernel(QuantizedData<Q> to, const T* dout, const float* cis,
                                                    const float* scale, int64_t time, int64_t HD,
                                                    int64_t rotated_columns) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, n = i / to.C, c = i % to.C;
    if (n >= to.N) return;
    float value = float(dout[i]);
    if (c < rotated_columns) {
        const int64_t half = HD / 2, j = c % HD;
        const bool first = j < half;
        const float* angle = cis + 2 * (n % time * half + j % half);
        value =
            rotated(value, float(dout[first ? i + half : i - half]), angle[0], first ? angle[1] : -angle[1]);
    }
    quantize_element(to, n, c, float(T(value)), *scale);
}

template <class T, class Q>
void rope_backward_quantize_naive(View<Q, 3> out, View<Q, 3> transposed, View<float, 1> amax,
                                  View<int32_t, 1> saturated, View<const T, 3> dout, View<const float, 3> cis,
                                  View<const float, 1> scale, int64_t rotated, LaunchContext context) {
    const int64_t N = dout.shape[0], NH = dout.shape[1], HD = dout.shape[2], C = NH * HD;
    launch(context.grid(N * C), rope_backward_quantize_naive_kernel<T, Q>,
           data_of(side_by_side(out, transposed, amax, saturated, N, C), N, C), dout.data, cis.data,
           scale.data, cis.shape[0], HD, std::min(rotated, NH) * HD);
}

// ---- vectorized: tiles, 128-bit accesses

template <class T>
struct RotatedSource {
    static constexpr int parts = 1, rows_in_flight = 1,
                         groups_ahead = 0;  // with more, fewer blocks fit: docs/log/kernels.md
    struct Fetched {
        Eight<T> own, other;
        Eight<float> angles[2];  // cosine and sine of eight pairs
    };
    const T* dout;
    const float* cis;
    int64_t C;
    unsigned time, HD, rotated_columns;

    __device__ bool is_first(unsigned c) const { return c % HD < HD / 2; }
    __device__ Fetched fetch(int64_t n, int64_t c_) const {
        const unsigned c = static_cast<unsigned>(c_), half = HD / 2;
        const T* const own = dout + n * C + c;
        Fetched f;
        f.own = load_eight(own);
        if (c >= rotated_columns) return f;
        f.other = load_eight(is_first(c) ? own + half : own - half);
        const float* const angle = cis + int64_t{static_cast<unsigned>(n) % time} * HD + 2 * (c % half);
        f.angles[0] = load_eight(angle);
        f.angles[1] = load_eight(angle + quantize_columns);
        return f;
    }
    __device__ void values(const Fetched& f, int64_t, int64_t c_, float (&v)[1][quantize_columns]) const {
        const unsigned c = static_cast<unsigned>(c_);
        unpack_eight<T>(f.own, v[0]);
        if (c >= rotated_columns) return;
        const float side = is_first(c) ? 1.0f : -1.0f;
        float other[quantize_columns];
        unpack_eight<T>(f.other, other);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float angles[quantize_columns];
            unpack_eight<float>(f.angles[i], angles);
#pragma unroll
            for (int k = 0; k < quantize_columns / 2; k++) {
                float& own = v[0][i * quantize_columns / 2 + k];
                own = rotated(own, other[i * quantize_columns / 2 + k], angles[2 * k],
                              side * angles[2 * k + 1]);
            }
        }
        round_eight<T>(v[0]);
    }
};

template <class T, class Q>
__global__ void __launch_bounds__(quantize_threads)
    rope_backward_quantize_vectorized_kernel(Dependent<QuantizedData<Q>> to_, Dependent<const T*> dout_,
                                             Dependent<const float*> cis_, Dependent<const float*> scale_,
                                             unsigned across, unsigned time, unsigned HD,
                                             unsigned rotated_columns) {
    const auto [to, dout, cis, scale] = wait(to_, dout_, cis_, scale_);
    quantize_tile<Q>(to, *scale, across, RotatedSource<T>{dout, cis, to.C, time, HD, rotated_columns});
}

template <class T, class Q>
void rope_backward_quantize_vectorized(View<Q, 3> out, View<Q, 3> transposed, View<float, 1> amax,
                                       View<int32_t, 1> saturated, View<const T, 3> dout,
                                       View<const float, 3> cis, View<const float, 1> scale, int64_t rotated,
                                       LaunchContext context) {
    const int64_t N = dout.shape[0], NH = dout.shape[1], HD = dout.shape[2], C = NH * HD;
    launch(tile_grid(N, C, 1, context.stream), rope_backward_quantize_vectorized_kernel<T, Q>,
           data_of(side_by_side(out, transposed, amax, saturated, N, C), N, C), dout.data, cis.data,
           scale.data, tiles_across(C, 1), static_cast<unsigned>(cis.shape[0]), static_cast<unsigned>(HD),
           static_cast<unsigned>(std::min(rotated, NH) * HD));
}

constexpr Constraints whole_halves{
    "HD and, beside transposed, N multiples of 16, operands aligned to 16 bytes, fewer than 2^31 rows and "
    "columns",
    [](const Call& c) {
        const int64_t C = c["NH"] * c["HD"], limit = int64_t{1} << 31;
        return c["HD"] % 16 == 0 && c["N"] < limit && C < limit && tiles_fit(c, c["N"], C, {"dout", "cis"});
    }};

Operation rope_backward_quantize(
    "rope_backward_quantize<T: f32 bf16 f64, A: arithmetic(T), Q: e4m3 e5m2 e4m3fnuz e5m2fnuz f64>"
    "(out?: Q[N,NH,HD], transposed?: Q[NH,HD,N], amax?~: A[1] >0 rounded, saturated?~: i32[1] >0;"
    " dout: T[N,NH,HD], cis: A[T,HD/2,2], scale: A[1] >0; rotated: int >=0 {2, 1}) multiple(N, T)"
    " test(N=160, T=80, NH=3, HD=48) test(N=16, T=16, NH=2, HD=144) test(N=2, T=1, NH=1, HD=16)"
    " test(N=2, T=2, NH=1, HD=2)",
    "fp8 of a gradient whose first heads are turned back, transposed too, and the largest size",
    {{"cpu", "tiles over threads", instantiations<LLAMAC_QUANTIZE(rope_backward_quantize_cpu)>()},
     {"vectorized", "tiles turned in registers and LDS, 128-bit accesses",
      instantiations<LLAMAC_QUANTIZE(rope_backward_quantize_vectorized)>(), whole_halves,
      blocks_of(quantize_threads)},
     {"naive", "one thread per element", instantiations<LLAMAC_QUANTIZE(rope_backward_quantize_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_QUANTIZE(rope_backward_quantize_reference),
                     rope_backward_quantize_reference<double, double>>()}},
    [](const Call& c) { return 4.0 * c["N"] * c["NH"] * c["HD"]; });

}  // namespace
}  // namespace llamac
