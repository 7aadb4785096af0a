// AdamW of a matrix that a product in fp8 reads: the update of adamw.hip, and quantize.hip of the new weight in the same pass.
//
//   weight, master, m, v = adamw(...)                      element [k,c] has the number offset + k C + c
//   out, transposed, amax, saturated = quantize(weight)    by the scale of the next forward pass
//
// A skipped step keeps the weight but writes its codes, as the scale may have changed. The rows of fused matrices are updated
// one after the other: transposed may be columns of a wider matrix.
//
// The variants are those of quantize, whose tiles they fill; naive runs one operation after the other. The bits are those of the
// two operations (tests/ops/check_quantize.cpp). Measured in training: docs/fp8.md.
#include "ops/adamw_update.h"
#include "ops/quantize.h"

namespace llamac {
namespace {

template <class T>
View<T, 1> flat(const View<T, 2>& x) {
    return {x.data, {x.shape[0] * x.shape[1]}, {1}};
}

template <class T, class G, class M, class Q>
void adamw_quantize_reference(View<Q, 2> out, View<Q, 2> transposed, View<arithmetic<T>, 1> amax,
                              View<int32_t, 1> saturated, View<T, 2> weight, View<arithmetic<T>, 2> master,
                              View<M, 2> m, View<M, 2> v, View<const G, 2> grad,
                              View<const double, 1> squares, View<const arithmetic<T>, 1> lr,
                              View<const int32_t, 1> step, View<const arithmetic<T>, 1> scale,
                              View<const double, 1> guard, double beta1, double beta2, double eps,
                              double weight_decay, double grad_clip, int64_t seed, int64_t stream,
                              int64_t offset) {
    adamw_reference<T, G, M>(flat(weight), flat(master), flat(m), flat(v), flat(grad), squares, lr, step,
                             guard, {}, beta1, beta2, eps, weight_decay, grad_clip, seed, stream, offset, 0,
                             0, 0);
    quantize_reference<T, Q>(out, transposed, amax, saturated, weight, scale);
}

template <class T, class G, class M, class Q>
void adamw_quantize_cpu(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> amax,
                        View<int32_t, 1> saturated, View<T, 2> weight, View<float, 2> master, View<M, 2> m,
                        View<M, 2> v, View<const G, 2> grad, View<const double, 1> squares,
                        View<const float, 1> lr, View<const int32_t, 1> step, View<const float, 1> scale,
                        View<const double, 1> guard, double beta1, double beta2, double eps,
                        double weight_decay, double grad_clip, int64_t seed, int64_t stream, int64_t offset) {
    const int64_t C = weight.shape[1];
    const bool skipped = is_skipped(squares(0), guard.data);
    const auto k =
        coefficients<float>(squares(0), lr(0), step(0), nullptr, beta1, beta2, eps, weight_decay, grad_clip);
    const bool random = (narrow<T> && !master) || narrow<M>;
    const auto update = master ? adamw_chunk<true, T, G, M> : adamw_chunk<false, T, G, M>;
    const auto rows = [&](int64_t n, int64_t count, T*) {
        const int64_t end = (n + count) * C;
        for (int64_t begin = n * C; begin < end && !skipped; begin += chunk) {
            uint32_t bits[chunk + 4];
            const int64_t element = offset + begin;
            if (random) random_bits(bits, element / 4, chunk / 4 + (element % 4 != 0), seed, step(0), stream);
            update(weight.data + begin, master ? master.data + begin : nullptr, m.data + begin,
                   v.data + begin, grad.data + begin, bits + element % 4, std::min(chunk, end - begin), k);
        }
        return weight.data + n * C;
    };
    quantize_rows<T>(Quantized<Q>{out, transposed, amax, saturated}, scale(0), weight.shape[0], C, rows);
}

// ---- naive

template <class T, class G, class M, class Q>
void adamw_quantize_naive(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> amax,
                          View<int32_t, 1> saturated, View<T, 2> weight, View<float, 2> master, View<M, 2> m,
                          View<M, 2> v, View<const G, 2> grad, View<const double, 1> squares,
                          View<const float, 1> lr, View<const int32_t, 1> step, View<const float, 1> scale,
                          View<const double, 1> guard, double beta1, double beta2, double eps,
                          double weight_decay, double grad_clip, int64_t seed, int64_t stream, int64_t offset,
                          LaunchContext context) {
    const int64_t K = weight.shape[0], C = weight.shape[1];
    const Grid grid(blocks_for(K * C, context.threads), context.threads, context.stream);
    launch(grid, adamw_naive_kernel<T, G, M>, weight.data, master.data, m.data, v.data, grad.data,
           squares.data, lr.data, step.data, guard.data, nullptr,
           settings_of(beta1, beta2, eps, weight_decay, grad_clip, seed, stream, offset), Numbering{offset},
           K * C);
    launch(grid, quantize_naive_kernel<T, Q>, data_of<Q>({out, transposed, amax, saturated}, K, C),
           weight.data, scale.data);
}

// ---- vectorized: tiles, 128-bit accesses

// A step's operands, as the kernels take them.
template <class T, class G, class M>
struct Update {
    T* weight;
    float* master;
    M *m, *v;
    const G* grad;
    const double* squares;
    const float* lr;
    const int32_t* step;
    const double* guard;
};

template <class T, class G, class M, bool has_master>
struct UpdateSource {
    static constexpr int parts = 1, rows_in_flight = 1, groups_ahead = 0;
    static_assert(unit == quantize_columns);
    struct Fetched {
        float w[unit], g[unit], mean[unit], square[unit];
    };
    const Update<T, G, M>& of;
    const Settings& settings;
    const Factors& factors;
    uint32_t now;
    int64_t P, C;

    __device__ Place<unit> place(int64_t k, int64_t c) const {
        const int64_t begin = k * C + c, block = (settings.offset + begin) / 4;
        // random_unit counts from the thread block's first Philox block on.
        return {
            {begin}, P, static_cast<uint32_t>(block) - 2 * threadIdx.x, static_cast<uint32_t>(block >> 32)};
    }
    __device__ Fetched fetch(int64_t k, int64_t c) const {
        const Place<unit> at = place(k, c);
        Fetched f;
        if constexpr (has_master)
            load_unit<true>(of.master, at, f.w);
        else
            load_unit<true>(of.weight, at, f.w);
        load_unit<true>(of.grad, at, f.g);
        load_unit<true>(of.m, at, f.mean);
        load_unit<true>(of.v, at, f.square);
        return f;
    }
    __device__ void values(Fetched& f, int64_t k, int64_t c, float (&v)[1][quantize_columns]) const {
        const Place<unit> at = place(k, c);
        if (factors.rate == skipped_rate) return load_unit<true>(of.weight, at, v[0]);
        update_unit<has_master, true>(of.weight, of.master, of.m, of.v, settings, factors, now, at, f.w, f.g,
                                      f.mean, f.square);
        for (int e = 0; e < unit; e++) {
            constexpr bool cut = !has_master && narrow<T>;
            v[0][e] = cut ? __uint_as_float(__float_as_uint(f.w[e]) & 0xffff0000u) : f.w[e];
        }
        round_eight<T>(v[0]);
    }
};

template <class T, class G, class M, class Q, bool has_master>
__global__ void __launch_bounds__(quantize_threads)
    adamw_quantize_vectorized_kernel(Dependent<QuantizedData<Q>> to_, Dependent<Update<T, G, M>> update_,
                                     Dependent<const float*> scale_, Dependent<Settings> settings_,
                                     unsigned across) {
    const auto [to, update, scale, settings] = wait(to_, update_, scale_, settings_);
    // In the place of the tile: with more LDS, fewer blocks would fit.
    static_assert(sizeof(Factors) <= sizeof(QuantizeShared));
    Factors& shared = *reinterpret_cast<Factors*>(&shared_memory<QuantizeShared>());
    if (threadIdx.x == 0)
        shared = factors_of(settings,
                            device_coefficients(settings, *update.squares, *update.lr, *update.step, nullptr),
                            is_skipped(*update.squares, update.guard));
    __syncthreads();
    const Factors factors = shared;
    __syncthreads();
    quantize_tile<Q>(to, *scale, across,
                     UpdateSource<T, G, M, has_master>{
                         update, settings, factors, static_cast<uint32_t>(*update.step), to.N * to.C, to.C});
}

template <class T, class G, class M, class Q>
void adamw_quantize_vectorized(View<Q, 2> out, View<Q, 2> transposed, View<float, 1> amax,
                               View<int32_t, 1> saturated, View<T, 2> weight, View<float, 2> master,
                               View<M, 2> m, View<M, 2> v, View<const G, 2> grad,
                               View<const double, 1> squares, View<const float, 1> lr,
                               View<const int32_t, 1> step, View<const float, 1> scale,
                               View<const double, 1> guard, double beta1, double beta2, double eps,
                               double weight_decay, double grad_clip, int64_t seed, int64_t stream,
                               int64_t offset, LaunchContext context) {
    const int64_t K = weight.shape[0], C = weight.shape[1];
    launch(tile_grid(K, C, 1, context.stream),
           master ? adamw_quantize_vectorized_kernel<T, G, M, Q, true>
                  : adamw_quantize_vectorized_kernel<T, G, M, Q, false>,
           data_of<Q>({out, transposed, amax, saturated}, K, C),
           Update<T, G, M>{weight.data, master.data, m.data, v.data, grad.data, squares.data, lr.data,
                           step.data, guard.data},
           scale.data, settings_of(beta1, beta2, eps, weight_decay, grad_clip, seed, stream, offset),
           tiles_across(C, 1));
}

// Weights are e4m3 of either form.
#define LLAMAC_ADAMW_QUANTIZE(LAUNCHER)                                                  \
    LAUNCHER<float, float, float, e4m3>, LAUNCHER<float, float, bf16, e4m3>,             \
        LAUNCHER<bf16, float, float, e4m3>, LAUNCHER<bf16, float, bf16, e4m3>,           \
        LAUNCHER<bf16, bf16, float, e4m3>, LAUNCHER<bf16, bf16, bf16, e4m3>,             \
        LAUNCHER<float, float, float, e4m3fnuz>, LAUNCHER<float, float, bf16, e4m3fnuz>, \
        LAUNCHER<bf16, float, float, e4m3fnuz>, LAUNCHER<bf16, float, bf16, e4m3fnuz>,   \
        LAUNCHER<bf16, bf16, float, e4m3fnuz>, LAUNCHER<bf16, bf16, bf16, e4m3fnuz>

Operation adamw_quantize(
    "adamw_quantize<T: f32 bf16 f64, A: arithmetic(T), G: f32 bf16 f64, M: f32 bf16 f64,"
    " Q: e4m3 e4m3fnuz f64>"
    "(out?: Q[K,C], transposed?: Q[C,K] strided, amax~: A[1] >0 rounded, saturated~: i32[1] >0,"
    " weight~: T[K,C] random(seed, master), master?~: A[K,C], m~: M[K,C] random(seed),"
    " v~: M[K,C] >0 random(seed);"
    " grad: G[K,C], squares: f64[1] >0, lr: A[1] >0, step: i32[1] >0, scale: A[1] >0, guard?: f64[1] >0;"
    " beta1: float {0.9}, beta2: float {0.95, 0.999}, eps: float {1e-5, 1e-6}, weight_decay: float {0.1, 0},"
    " grad_clip: float {1, 0}, seed: int {42, 1e12}, stream: int {4},"
    " offset: int = 0 {0, 17179867136, 3}) test(K=160, C=144) test(K=16, C=272)",
    "adamw, and fp8 of the new weight",
    {{"cpu", "rows over threads", instantiations<LLAMAC_ADAMW_QUANTIZE(adamw_quantize_cpu)>()},
     {"vectorized", "tiles turned in registers and LDS, 128-bit accesses",
      instantiations<LLAMAC_ADAMW_QUANTIZE(adamw_quantize_vectorized)>(),
      Constraints{"K and C multiples of 16, an offset that is a multiple of 8, operands aligned to 16 bytes",
                  [](const Call& c) {
                      return static_cast<int64_t>(c.number("offset")) % unit == 0 &&
                             tiles_fit(c, c["K"], c["C"], {"weight", "master", "m", "v", "grad"});
                  }},
      blocks_of(quantize_threads)},
     {"naive", "one thread per element", instantiations<LLAMAC_ADAMW_QUANTIZE(adamw_quantize_naive)>()},
     {"reference", "plain loops",
      instantiations<LLAMAC_ADAMW_QUANTIZE(adamw_quantize_reference),
                     adamw_quantize_reference<double, double, double, double>>()}},
    [](const Call& c) { return 16.0 * c["K"] * c["C"]; }, adamw_bytes);

}  // namespace
}  // namespace llamac
