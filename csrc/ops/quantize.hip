// Quantization for matrix products in fp8 (core/fp8.h), with one scale per tensor.
//
//   quantize:       out[n,c] = transposed[c,n] = round(x[n,c] * scale), saturating
//                   amax = max(amax, max |x|);  saturated += the number of elements beyond the largest value
//   update_scales:  scale[p] = the largest power of two with amax[p] * scale[p] <= limit[p];  inverse[p,0] = 1 / scale[p];
//                   largest[p] = amax[p] / unit[p];  amax[p] = 0
//                   If amax is 0, infinite or NaN, largest[p] is kept, and largest[p] * unit[p] replaces amax[p]; if that is not
//                   positive either, or largest is null, scale and inverse are kept. unit: the current unit of the tensors'
//                   values, 1 if null. Products read inverse, whose addresses the vendors' libraries want at multiples of
//                   16 bytes.
//
// A product sums along neighbors in memory of both operands. So the gradient of a weight needs both of its operands
// transposed, and the gradient of an input needs the weight transposed.
//
// With delayed scaling, scale comes from the maxima of the optimizer step before, and one pass does it all. With current
// scaling, a first call takes the maximum alone, update_scales follows, and a second call writes. Any output may be null.
// A NaN in x makes amax NaN. Maxima and counts do not depend on the order of threads.
//
// reference:  plain loops.
// cpu:        tiles over threads.
// naive:      one thread per element.
// vectorized: a tile of 128 x 128 per block; 128-bit accesses on all sides. Transposition: four by four in registers, then as
//             words in LDS, whose places keep writes and reads free of bank conflicts.
//
// Measured in training: docs/fp8.md.
#include "ops/quantize.h"

#include <cfloat>

namespace llamac {
namespace {

template <class T, class Q>
void quantize_cpu(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> amax, View<int32_t, 1> saturated,
                  View<const T, 2> x, View<const float, 1> scale) {
    quantize_rows<T>(Quantized<Q>{out, transposed, amax, saturated}, scale(0), x.shape[0], x.shape[1],
                     [&](int64_t n, int64_t, T*) { return &x(n, 0); });
}

// ---- naive

template <class T, class Q>
void quantize_naive(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> amax, View<int32_t, 1> saturated,
                    View<const T, 2> x, View<const float, 1> scale, LaunchContext context) {
    const int64_t N = x.shape[0], C = x.shape[1];
    launch(context.grid(N * C), quantize_naive_kernel<T, Q>,
           data_of<Q>({out, transposed, amax, saturated}, N, C), x.data, scale.data);
}

// ---- vectorized: tiles, 128-bit accesses

template <class T>
struct ReadSource {
    static constexpr int parts = 1, rows_in_flight = quantize_rows_at_once,
                         groups_ahead = sizeof(T) == 2 && has_registers_ahead ? 1 : 0;
    using Fetched = Eight<T>;
    const T* x;
    int64_t C;

    __device__ Fetched fetch(int64_t n, int64_t c) const { return load_eight(x + n * C + c); }
    __device__ void values(const Fetched& f, int64_t, int64_t, float (&v)[1][quantize_columns]) const {
        unpack_eight<T>(f, v[0]);
    }
};

template <class T, class Q>
__global__ void __launch_bounds__(quantize_threads)
    quantize_vectorized_kernel(Dependent<QuantizedData<Q>> to_, Dependent<const T*> x_,
                               Dependent<const float*> scale_, unsigned across) {
    const auto [to, x, scale] = wait(to_, x_, scale_);
    quantize_tile<Q>(to, *scale, across, ReadSource<T>{x, to.C});
}

template <class T, class Q>
void quantize_vectorized(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> amax,
                         View<int32_t, 1> saturated, View<const T, 2> x, View<const float, 1> scale,
                         LaunchContext context) {
    const int64_t N = x.shape[0], C = x.shape[1];
    launch(tile_grid(N, C, 1, context.stream), quantize_vectorized_kernel<T, Q>,
           data_of<Q>({out, transposed, amax, saturated}, N, C), x.data, scale.data, tiles_across(C, 1));
}

constexpr Constraints whole_vectors{
    "C and, beside transposed, N multiples of 16, operands aligned to 16 bytes",
    [](const Call& c) { return tiles_fit(c, c["N"], c["C"], {"x"}); }};

// ---- update_scales

constexpr int64_t inverse_row = 4;

struct ScaleTables {
    float *scale, *inverse, *amax, *largest;
    const float *limit, *unit;

    __host__ __device__ static bool is_size(float x) { return x > 0 && x <= FLT_MAX; }
    __host__ __device__ void update(int64_t p) const {
        float size = amax[p];
        const float of_unit = unit ? unit[p] : 1.0f;
        if (largest && is_size(size))
            largest[p] = size / of_unit;
        else if (largest)
            size = largest[p] * of_unit;
        if (is_size(size)) {
            scale[p] = fp8_scale(size, limit[p]);
            inverse[p * inverse_row] = 1.0f / scale[p];
        }
        amax[p] = 0;
    }
};

void update_scales_reference(View<float, 1> scale, View<float, 2> inverse, View<float, 1> amax,
                             View<float, 1> largest, View<const float, 1> limit, View<const float, 1> unit) {
    const ScaleTables tables{scale.data, inverse.data, amax.data, largest.data, limit.data, unit.data};
    for (int64_t p = 0; p < scale.shape[0]; p++) tables.update(p);
}

__global__ void update_scales_naive_kernel(ScaleTables tables, int64_t P) {
    const int64_t p = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (p < P) tables.update(p);
}

void update_scales_naive(View<float, 1> scale, View<float, 2> inverse, View<float, 1> amax,
                         View<float, 1> largest, View<const float, 1> limit, View<const float, 1> unit,
                         LaunchContext context) {
    const int64_t P = scale.shape[0];
    launch(context.grid(P), update_scales_naive_kernel,
           ScaleTables{scale.data, inverse.data, amax.data, largest.data, limit.data, unit.data}, P);
}

Operation quantize(
    "quantize<T: f32 bf16 f64, A: arithmetic(T), Q: e4m3 e5m2 e4m3fnuz e5m2fnuz f64>"
    "(out?: Q[N,C], transposed?: Q[C,N], amax?~: A[1] >0, saturated?~: i32[1] >0;"
    " x: T[N,C], scale: A[1] >0)"
    " test(N=160, C=144) test(N=16, C=272) test_large(N=1040, C=2064)",
    "fp8 of x * scale, transposed too, and the largest |x|",
    {{"cpu", "tiles over threads", instantiations<LLAMAC_QUANTIZE(quantize_cpu)>()},
     {"vectorized", "tiles turned in registers and LDS, 128-bit accesses",
      instantiations<LLAMAC_QUANTIZE(quantize_vectorized)>(), whole_vectors, blocks_of(quantize_threads)},
     {"naive", "one thread per element", instantiations<LLAMAC_QUANTIZE(quantize_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_QUANTIZE(quantize_reference), quantize_reference<double, double>>()}},
    [](const Call& c) { return 1.0 * c["N"] * c["C"]; });

Operation update_scales(
    "update_scales(scale~: f32[P] >0, inverse~: f32[P,4] >0, amax~: f32[P] >0, largest?~: f32[P] >0;"
    " limit: f32[P] >0, unit?: f32[P] >0)",
    "scales of fp8 from the largest values, which begin anew",
    {{"naive", "one thread per element", instantiations<update_scales_naive>()},
     {"reference", "plain loops", instantiations<update_scales_reference>()}});

}  // namespace
}  // namespace llamac
