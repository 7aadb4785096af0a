// SwiGLU and its gradient as codes of fp8, for matrix products in fp8.
//
//   swiglu_forward_quantize:   quantize of swiglu_forward's out
//   swiglu_backward_quantize:  quantize of swiglu_backward's dgate_up: dgate and dup side by side have one scale
//
// The results are rounded to the storage type, but never stored. The codes have the bits of the two operations one after the
// other (tests/ops/check_quantize.cpp).
//
// The variants are those of quantize, whose tiles they fill. vectorized: the backward makes a tile of dgate and one of dup at
// once; the codes of dup wait in registers for the place in LDS. Measured in training: docs/fp8.md.
#include "ops/quantize.h"
#include "ops/swiglu.h"

namespace llamac {
namespace {

template <class T, class Q>
void swiglu_forward_quantize_reference(View<Q, 2> out, View<Q, 2> transposed, View<arithmetic<T>, 1> amax,
                                       View<int32_t, 1> saturated, View<const T, 2> gate_up,
                                       View<const arithmetic<T>, 1> scale) {
    const int64_t N = gate_up.shape[0], F = gate_up.shape[1] / 2;
    std::vector<T> values(static_cast<size_t>(N * F));
    swiglu_forward_reference<T>(rows_of(values.data(), N, F), gate_up);
    quantize_reference<T, Q>(out, transposed, amax, saturated, rows_of<const T>(values.data(), N, F), scale);
}

template <class T, class Q>
void swiglu_backward_quantize_reference(View<Q, 2> out, View<Q, 2> transposed, View<arithmetic<T>, 1> amax,
                                        View<int32_t, 1> saturated, View<const T, 2> dout,
                                        View<const T, 2> gate_up, View<const arithmetic<T>, 1> scale) {
    const int64_t N = gate_up.shape[0], C = gate_up.shape[1];
    std::vector<T> values(static_cast<size_t>(N * C));
    swiglu_backward_reference<T>(rows_of(values.data(), N, C), View<T, 2>{}, dout, gate_up);
    quantize_reference<T, Q>(out, transposed, amax, saturated, rows_of<const T>(values.data(), N, C), scale);
}

template <class T, class Q>
void swiglu_forward_quantize_cpu(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> amax,
                                 View<int32_t, 1> saturated, View<const T, 2> gate_up,
                                 View<const float, 1> scale) {
    const int64_t N = gate_up.shape[0], F = gate_up.shape[1] / 2;
    quantize_rows<T>(Quantized<Q>{out, transposed, amax, saturated}, scale(0), N, F,
                     [&](int64_t first, int64_t count, T* memory) {
                         for (int64_t n = 0; n < count; n++)
                             swiglu_row(memory + n * F, &gate_up(first + n, 0), F);
                         return memory;
                     });
}

template <class T, class Q>
void swiglu_backward_quantize_cpu(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> amax,
                                  View<int32_t, 1> saturated, View<const T, 2> dout, View<const T, 2> gate_up,
                                  View<const float, 1> scale) {
    const int64_t N = gate_up.shape[0], F = gate_up.shape[1] / 2;
    quantize_rows<T>(Quantized<Q>{out, transposed, amax, saturated}, scale(0), N, 2 * F,
                     [&](int64_t first, int64_t count, T* memory) {
                         for (int64_t n = 0; n < count; n++)
                             swiglu_backward_row(memory + n * 2 * F, &dout(first + n, 0),
                                                 &gate_up(first + n, 0), F);
                         return memory;
                     });
}

// ---- naive

template <class T, class Q>
__global__ void swiglu_forward_quantize_naive_kernel(QuantizedData<Q> to, const T* gate_up,
                                                     const float* scale) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, F = to.C;
    if (i >= to.N * F) return;
    const int64_t n = i / F, f = i % F;
    const float g = float(gate_up[n * 2 * F + f]), up = float(gate_up[n * 2 * F + F + f]);
    quantize_element(to, n, f, float(swiglu_naive<T>(g, up)), *scale);
}

template <class T, class Q>
void swiglu_forward_quantize_naive(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> amax,
                                   View<int32_t, 1> saturated, View<const T, 2> gate_up,
                                   View<const float, 1> scale, LaunchContext context) {
    const int64_t N = gate_up.shape[0], F = gate_up.shape[1] / 2;
    launch(context.grid(N * F), swiglu_forward_quantize_naive_kernel<T, Q>,
           data_of<Q>({out, transposed, amax, saturated}, N, F), gate_up.data, scale.data);
}

template <class T, class Q>
__global__ void swiglu_backward_quantize_naive_kernel(QuantizedData<Q> to, const T* dout, const T* gate_up,
                                                      const float* scale) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, F = to.C / 2;
    if (i >= to.N * F) return;
    const int64_t n = i / F, f = i % F, gate = n * 2 * F + f, up = gate + F;
    T dgate, dup;
    swiglu_backward_naive_element(&dgate, &dup, float(dout[i]), float(gate_up[gate]), float(gate_up[up]));
    quantize_element(to, n, f, float(dgate), *scale);
    quantize_element(to, n, F + f, float(dup), *scale);
}

template <class T, class Q>
void swiglu_backward_quantize_naive(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> amax,
                                    View<int32_t, 1> saturated, View<const T, 2> dout,
                                    View<const T, 2> gate_up, View<const float, 1> scale,
                                    LaunchContext context) {
    const int64_t N = dout.shape[0], F = dout.shape[1];
    launch(context.grid(N * F), swiglu_backward_quantize_naive_kernel<T, Q>,
           data_of<Q>({out, transposed, amax, saturated}, N, 2 * F), dout.data, gate_up.data, scale.data);
}

// ---- vectorized: tiles, 128-bit accesses

template <class T>
struct SwigluSource {
    static constexpr int parts = 1, rows_in_flight = quantize_rows_at_once,
                         groups_ahead = sizeof(T) == 2 && has_registers_ahead ? 1 : 0;
    struct Fetched {
        Eight<T> gate, up;
    };
    const T* gate_up;
    int64_t F;

    __device__ Fetched fetch(int64_t n, int64_t f) const {
        const T* const row = gate_up + n * 2 * F + f;
        return {load_eight(row), load_eight(row + F)};
    }
    __device__ void values(const Fetched& fetched, int64_t, int64_t, float (&v)[1][quantize_columns]) const {
        float up[quantize_columns];
        unpack_eight<T>(fetched.gate, v[0]);
        unpack_eight<T>(fetched.up, up);
        swiglu_vector<T>(v[0], up);
        round_eight<T>(v[0]);
    }
};

template <class T>
struct SwigluGradientSource {
    static constexpr int parts = 2, groups_ahead = 0,
                         rows_in_flight = sizeof(T) == 2 ? 2 : 1;  // more would spill
    struct Fetched {
        Eight<T> gate, up, dout;
    };
    const T *dout, *gate_up;
    int64_t F;

    __device__ Fetched fetch(int64_t n, int64_t f) const {
        const T* const row = gate_up + n * 2 * F + f;
        return {load_eight(row), load_eight(row + F), load_eight(dout + n * F + f)};
    }
    __device__ void values(const Fetched& fetched, int64_t, int64_t, float (&v)[2][quantize_columns]) const {
        float up[quantize_columns];
        unpack_eight<T>(fetched.gate, v[0]);
        unpack_eight<T>(fetched.up, up);
        unpack_eight<T>(fetched.dout, v[1]);
        swiglu_backward_vector<T>(v[0], up, v[1]);
        round_eight<T>(v[0]);
        round_eight<T>(v[1]);
    }
};

template <class T, class Q>
__global__ void __launch_bounds__(quantize_threads)
    swiglu_forward_quantize_vectorized_kernel(Dependent<QuantizedData<Q>> to_, Dependent<const T*> gate_up_,
                                              Dependent<const float*> scale_, unsigned across) {
    const auto [to, gate_up, scale] = wait(to_, gate_up_, scale_);
    quantize_tile<Q>(to, *scale, across, SwigluSource<T>{gate_up, to.C});
}

template <class T, class Q>
__global__ void __launch_bounds__(quantize_threads)
    swiglu_backward_quantize_vectorized_kernel(Dependent<QuantizedData<Q>> to_, Dependent<const T*> dout_,
                                               Dependent<const T*> gate_up_, Dependent<const float*> scale_,
                                               unsigned across) {
    const auto [to, dout, gate_up, scale] = wait(to_, dout_, gate_up_, scale_);
    quantize_tile<Q>(to, *scale, across, SwigluGradientSource<T>{dout, gate_up, to.C / 2});
}

template <class T, class Q>
void swiglu_forward_quantize_vectorized(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> amax,
                                        View<int32_t, 1> saturated, View<const T, 2> gate_up,
                                        View<const float, 1> scale, LaunchContext context) {
    const int64_t N = gate_up.shape[0], F = gate_up.shape[1] / 2;
    launch(tile_grid(N, F, 1, context.stream), swiglu_forward_quantize_vectorized_kernel<T, Q>,
           data_of<Q>({out, transposed, amax, saturated}, N, F), gate_up.data, scale.data,
           tiles_across(F, 1));
}

template <class T, class Q>
void swiglu_backward_quantize_vectorized(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> amax,
                                         View<int32_t, 1> saturated, View<const T, 2> dout,
                                         View<const T, 2> gate_up, View<const float, 1> scale,
                                         LaunchContext context) {
    const int64_t N = dout.shape[0], C = gate_up.shape[1];
    launch(tile_grid(N, C, 2, context.stream), swiglu_backward_quantize_vectorized_kernel<T, Q>,
           data_of<Q>({out, transposed, amax, saturated}, N, C), dout.data, gate_up.data, scale.data,
           tiles_across(C, 2));
}

constexpr const char* whole_words =
    "F and, beside transposed, N multiples of 16, operands aligned to 16 bytes";

Operation swiglu_forward_quantize(
    "swiglu_forward_quantize<T: f32 bf16 f64, A: arithmetic(T), Q: e4m3 e5m2 e4m3fnuz e5m2fnuz f64>"
    "(out?: Q[N,F], transposed?: Q[F,N], amax?~: A[1] >0 rounded, saturated?~: i32[1] >0;"
    " gate_up: T[N,2F], scale: A[1] >0)"
    " test(N=160, F=144) test(N=16, F=272)",
    "fp8 of silu(gate) * up, transposed too, and the largest size",
    {{"cpu", "tiles over threads", instantiations<LLAMAC_QUANTIZE(swiglu_forward_quantize_cpu)>()},
     {"vectorized", "tiles turned in registers and LDS, 128-bit accesses",
      instantiations<LLAMAC_QUANTIZE(swiglu_forward_quantize_vectorized)>(),
      Constraints{whole_words, [](const Call& c) { return tiles_fit(c, c["N"], c["F"], {"gate_up"}); }},
      blocks_of(quantize_threads)},
     {"naive", "one thread per element", instantiations<LLAMAC_QUANTIZE(swiglu_forward_quantize_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_QUANTIZE(swiglu_forward_quantize_reference),
                     swiglu_forward_quantize_reference<double, double>>()}},
    [](const Call& c) { return 6.0 * c["N"] * c["F"]; });

Operation swiglu_backward_quantize(
    "swiglu_backward_quantize<T: f32 bf16 f64, A: arithmetic(T), Q: e4m3 e5m2 e4m3fnuz e5m2fnuz f64>"
    "(out?: Q[N,2F], transposed?: Q[2F,N], amax?~: A[1] >0 rounded, saturated?~: i32[1] >0;"
    " dout: T[N,F], gate_up: T[N,2F], scale: A[1] >0)"
    " test(N=160, F=144) test(N=16, F=272)",
    "fp8 of the gradients of gate and up, transposed too, and the largest size",
    {{"cpu", "tiles over threads", instantiations<LLAMAC_QUANTIZE(swiglu_backward_quantize_cpu)>()},
     {"vectorized", "tiles of both turned in registers and LDS, 128-bit accesses",
      instantiations<LLAMAC_QUANTIZE(swiglu_backward_quantize_vectorized)>(),
      Constraints{whole_words,
                  [](const Call& c) { return tiles_fit(c, c["N"], c["F"], {"dout", "gate_up"}); }},
      blocks_of(quantize_threads)},
     {"naive", "one thread per element", instantiations<LLAMAC_QUANTIZE(swiglu_backward_quantize_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_QUANTIZE(swiglu_backward_quantize_reference),
                     swiglu_backward_quantize_reference<double, double>>()}},
    [](const Call& c) { return 13.0 * c["N"] * c["F"]; });

}  // namespace
}  // namespace llamac
