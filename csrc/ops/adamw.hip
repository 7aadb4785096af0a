// AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019), with clipping by the gradient's global norm.
//
//   g = grad * min(1, grad_clip / (sqrt(squares) + 1e-6))          where grad_clip > 0
//   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
//   w = w - lr (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps) + weight_decay w)
//
// squares is the sum of all gradients' squares (global_norm). squares, lr and step are read from memory, so that a captured
// step can be replayed.
//
// With master weights, the update is made on master, and weight is master rounded. Without them a bf16 weight is rounded
// stochastically, and bf16 moments always are, so that updates far below half an ulp are not lost on average: random bits are
// added below the 16 bits that stay, then those below are cut. The bits are Philox's of (seed, step, stream, element): the upper
// 16 of its 32 for the weight, 8 each for m and v, with a constant below that makes the average exact. A byte is off by at most
// 2^-9 of an ulp; a moment changes by 1 - beta of itself, and an ulp is at most 2^-7 of it. The update itself uses m and v
// before they are rounded.
//
// guard (optional) is another sum of squares, of the losses. If squares or guard is not finite, or a float cannot hold the root
// of their sum, the step is skipped: nothing is written.
//
// scale (optional): the gradients, and the root of squares, are that many times as large (loss_scale.hip).
//
// offset is the number of the first element within its tensor: a tensor that is updated in pieces gets the bits of the whole. So does
// a part that consists of runs of the tensor's elements (model/mesh.h), in which offset is that number; `vectorized` takes none.
//
// reference:  plain loops.
// cpu:        fixed chunks over threads; the random bits of a chunk come first, four elements per Philox block.
// naive:      one thread per element.
// vectorized: eight elements per thread, 128-bit accesses, all loads of a thread in flight before the first use; meanwhile one
//             thread of a block computes the factors of the step. Small blocks pass over memory once, in order: a grid that
//             stays resident is 5% slower. If everything is bf16, arithmetic matters beside memory, most of all at the lower
//             clock of a training step: 14 bytes, 32 Philox bits and 41 instructions after the loads per element.
//
// adamw_update.h has the functions that adamw_quantize.hip shares. Measured: docs/benchmarks/nvidia-h200.md.
#include "ops/adamw_update.h"

#include <algorithm>

namespace llamac {
namespace {

template <class T>
constexpr bool always_master = std::is_same_v<T, fp16>;

template <class T, class G, class M>
void adamw_cpu(View<T, 1> weight, View<float, 1> master, View<M, 1> m, View<M, 1> v, View<const G, 1> grad,
               View<const double, 1> squares, View<const float, 1> lr, View<const int32_t, 1> step,
               View<const double, 1> guard, View<const float, 1> scale, double beta1, double beta2,
               double eps, double weight_decay, double grad_clip, int64_t seed, int64_t stream,
               int64_t offset, int64_t run, int64_t distance, int64_t start) {
    if (is_skipped(squares(0), guard.data)) return;
    const auto k = coefficients<float>(squares(0), lr(0), step(0), scale.data, beta1, beta2, eps,
                                       weight_decay, grad_clip);
    const int64_t P = weight.shape[0], within = run ? 0 : offset % 4;
    const Numbering numbering{offset, run, distance, start};
    const bool random = (narrow<T> && !master) || narrow<M>;
#pragma omp parallel for
    for (int64_t begin = 0; begin < P; begin += chunk) {
        uint32_t bits[chunk + 4];
        if (random && run)
            for (int64_t p = 0; p < std::min(chunk, P - begin); p++) {
                const int64_t element = numbering.of(begin + p);
                bits[p] = random_block(static_cast<uint64_t>(seed), static_cast<uint32_t>(step(0)),
                                       static_cast<uint32_t>(stream), element / 4)
                              .bits[element % 4];
            }
        else if (random)
            random_bits(bits, (offset + begin) / 4, chunk / 4 + (within != 0), seed, step(0), stream);
        const auto update = master ? adamw_chunk<true, T, G, M> : adamw_chunk<always_master<T>, T, G, M>;
        update(&weight(begin), master ? &master(begin) : nullptr, &m(begin), &v(begin), &grad(begin),
               bits + within, std::min(chunk, P - begin), k);
    }
}

// ---- kernels

template <class T, class G, class M>
void adamw_naive(View<T, 1> weight, View<float, 1> master, View<M, 1> m, View<M, 1> v, View<const G, 1> grad,
                 View<const double, 1> squares, View<const float, 1> lr, View<const int32_t, 1> step,
                 View<const double, 1> guard, View<const float, 1> scale, double beta1, double beta2,
                 double eps, double weight_decay, double grad_clip, int64_t seed, int64_t stream,
                 int64_t offset, int64_t run, int64_t distance, int64_t start, LaunchContext context) {
    const int64_t P = weight.shape[0];
    launch(context.grid(P), adamw_naive_kernel<T, G, M>, weight.data, master.data, m.data, v.data, grad.data,
           squares.data, lr.data, step.data, guard.data, scale.data,
           settings_of(beta1, beta2, eps, weight_decay, grad_clip, seed, stream, offset),
           Numbering{offset, run, distance, start}, P);
}

template <class T, class G, class M, bool aligned, bool has_master, int run = run_of<T, M, has_master>>
__global__ void __launch_bounds__(bound_threads<run>, bound_blocks<run>)
    adamw_vectorized_kernel(Dependent<T*> weight_, Dependent<float*> master_, Dependent<M*> m_,
                            Dependent<M*> v_, Dependent<const G*> grad_, Dependent<const double*> squares_,
                            Dependent<const float*> lr_, Dependent<const int32_t*> step_,
                            Dependent<const double*> guard_, Dependent<const float*> scale_,
                            Dependent<Settings> settings_, int64_t P) {
    const auto [weight, master, m, v, grad, squares, lr, step, guard, scale, settings] =
        wait(weight_, master_, m_, v_, grad_, squares_, lr_, step_, guard_, scale_, settings_);
    const int64_t width = int64_t{blockDim.x} * unit, base = blockIdx.x * width;
    const int64_t block = (settings.offset + base) / 4;
    Place<run> at{{}, P, static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32)};
    for (int r = 0; r < unit / run; r++) at.begin[r] = base + (int64_t{r} * blockDim.x + threadIdx.x) * run;
    if (aligned && base + width <= P)
        adamw_unit<has_master, true>(weight, master, m, v, grad, squares, lr, step, guard, scale, settings,
                                     at);
    else
        adamw_unit<has_master, false>(weight, master, m, v, grad, squares, lr, step, guard, scale, settings,
                                      at);
}

bool has_master_for_fp16(const Call& c) {
    return c.operand("weight").dtype != DType::fp16 || c.operand("master").data;
}
constexpr Constraints master_for_fp16{"a master where weights are fp16", has_master_for_fp16};

// Whole Philox blocks, and no thread block with numbers of them both below and above 2^32.
bool adamw_vectorized_takes(const Call& c) {
    if (!has_master_for_fp16(c)) return false;
    const int64_t offset = static_cast<int64_t>(c.number("offset")), widest = 256 * unit;
    return c.number("run") == 0 && offset % 4 == 0 &&
           (offset % widest == 0 || offset >> 34 == (offset + c["P"]) >> 34);
}

template <class T, class G, class M>
void adamw_vectorized(View<T, 1> weight, View<float, 1> master, View<M, 1> m, View<M, 1> v,
                      View<const G, 1> grad, View<const double, 1> squares, View<const float, 1> lr,
                      View<const int32_t, 1> step, View<const double, 1> guard, View<const float, 1> scale,
                      double beta1, double beta2, double eps, double weight_decay, double grad_clip,
                      int64_t seed, int64_t stream, int64_t offset, int64_t, int64_t, int64_t,
                      LaunchContext context) {
    const int64_t P = weight.shape[0];
    const bool aligned = is_whole({weight.data, master.data, m.data, v.data, grad.data}, 0, unit);
    const auto kernel = master    ? aligned ? adamw_vectorized_kernel<T, G, M, true, true>
                                            : adamw_vectorized_kernel<T, G, M, false, true>
                        : aligned ? adamw_vectorized_kernel<T, G, M, true, always_master<T>>
                                  : adamw_vectorized_kernel<T, G, M, false, always_master<T>>;
    const unsigned blocks = blocks_for(P, int64_t{unit} * context.threads);
    launch(Grid(blocks, context.threads, context.stream), kernel, weight.data, master.data, m.data, v.data,
           grad.data, squares.data, lr.data, step.data, guard.data, scale.data,
           settings_of(beta1, beta2, eps, weight_decay, grad_clip, seed, stream, offset), P);
}

// A launcher for each combination of the types of weights, gradients and moments.
#define LLAMAC_ADAMW(LAUNCHER)                                                                 \
    LAUNCHER<float, float, float>, LAUNCHER<float, float, bf16>, LAUNCHER<bf16, float, float>, \
        LAUNCHER<bf16, float, bf16>, LAUNCHER<bf16, bf16, float>, LAUNCHER<bf16, bf16, bf16>,  \
        LAUNCHER<fp16, float, float>, LAUNCHER<fp16, float, bf16>

// Two cases of each run: check_operations aligns the operands of every other one.
Operation adamw(
    "adamw<T: f32 bf16 fp16 f64, A: arithmetic(T), G: f32 bf16 f64, M: f32 bf16 f64>"
    "(weight~: T[P] random(seed, master), master?~: A[P], m~: M[P] random(seed), v~: M[P] >0 "
    "random(seed);"
    " grad: G[P], squares: f64[1] >0, lr: A[1] >0, step: i32[1] >0,"
    " guard?: f64[1] >0, scale?: A[1] >0;"
    " beta1: float {0.9}, beta2: float {0.95, 0.999}, eps: float {1e-5, 1e-6}, weight_decay: float {0.1, 0},"
    " grad_clip: float {1, 0}, seed: int {42, 1e12}, stream: int {4},"
    " offset: int = 0 {0, 17179867136, 3}, run: int = 0 {0, 0, 6, 6}, distance: int = 0 {18}, start: int = 0 "
    "{12})"
    " empty(P)",
    "one update: clipping, moments, decoupled weight decay, rounding to storage",
    {{"cpu", "fixed chunks over threads", instantiations<LLAMAC_ADAMW(adamw_cpu)>(), master_for_fp16},
     {"vectorized", "eight elements per thread, 128-bit accesses",
      instantiations<LLAMAC_ADAMW(adamw_vectorized)>(),
      Constraints{
          "no run; an offset that is a multiple of 4, or of 2048 where elements pass number 2^34; a master "
          "where weights are fp16",
          adamw_vectorized_takes},
      blocks_of(128, 256)},
     {"naive", "one thread per element", instantiations<LLAMAC_ADAMW(adamw_naive)>(), master_for_fp16},
     {"reference", "plain loops",
      instantiations<LLAMAC_ADAMW(adamw_reference), adamw_reference<double, double, double>>(),
      master_for_fp16}},
    [](const Call& c) { return 15.0 * c["P"]; }, adamw_bytes);

}  // namespace
}  // namespace llamac
