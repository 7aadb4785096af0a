// AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019), with the clipping of the
// gradient's global norm folded in.
//
//   g = grad * min(1, grad_clip / (grad_norm + 1e-6))              where grad_clip > 0
//   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
//   w = w - lr (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps) + weight_decay w)
//
// lr, step and grad_norm are read from memory, not passed as scalars, so that a captured step can be
// replayed.
//
// With master weights the update is made on master, and weight is master rounded. Without them a
// bf16 weight, and bf16 moments always, are rounded stochastically, so that updates far below half an ulp are
// not lost on average: add 16 random bits below those that stay, cut. The bits are Philox's of (seed, step,
// stream, element): stream for the weight, stream + 1 and stream + 2 for m and v. The update itself uses m
// and v before they are rounded.
//
// reference: plain loops.
// cpu:       fixed chunks over threads; the random words of a chunk come first, four elements a Philox block.
#include <algorithm>
#include <cmath>

#include "core/random.h"
#include "core/registry.h"
#include "core/simd.h"

namespace llamac {
namespace {

template <class A>
struct Coefficients {
    A beta1, rest1, beta2, rest2;  // rest = 1 - beta, rounded once: 1 - 0.999f has lost four digits
    A bias1, bias2;                // 1 / (1 - beta^step)
    A clip, lr, eps, decay;
};

template <class A>
Coefficients<A> coefficients(A grad_norm, A lr, int32_t step, double beta1, double beta2, double eps,
                             double weight_decay, double grad_clip) {
    const double clip = grad_clip > 0 ? std::min(1.0, grad_clip / (double(grad_norm) + 1e-6)) : 1.0;
    const double bias1 = 1 / (1 - std::pow(beta1, step)), bias2 = 1 / (1 - std::pow(beta2, step));
    return {A(beta1), A(1 - beta1), A(beta2), A(1 - beta2), A(bias1),
            A(bias2), A(clip),      lr,       A(eps),       A(weight_decay)};
}

// Updates the moments, returns the new weight.
template <class A>
inline A adamw_element(A w, A& m, A& v, A grad, const Coefficients<A>& k) {
    const A g = grad * k.clip;
    m = k.beta1 * m + k.rest1 * g;
    v = k.beta2 * v + k.rest2 * (g * g);
    return w - k.lr * (m * k.bias1 / (std::sqrt(v * k.bias2) + k.eps) + k.decay * w);
}

// *p = value, rounded by the word where T is bf16: random bits below those that stay, then cut. Infinity and
// NaN as usual.
template <class T>
inline void store_stochastic(T* p, arithmetic<T> value, uint32_t) {
    *p = value;
}
template <>
inline void store_stochastic<bf16>(bf16* p, float value, uint32_t word) {
    union {
        float f;
        uint32_t u;
    } bits{value};
    const bool finite = (bits.u & 0x7f800000u) != 0x7f800000u;
    const uint32_t cut = (bits.u + (word >> 16)) >> 16;
    p->bits = finite ? static_cast<uint16_t>(cut) : bf16(value).bits;
}

template <class T, class G, class M>
void adamw_reference(View<T, 1> weight, View<arithmetic<T>, 1> master, View<M, 1> m, View<M, 1> v,
                     View<const G, 1> grad, View<const arithmetic<T>, 1> grad_norm,
                     View<const arithmetic<T>, 1> lr, View<const int32_t, 1> step, double beta1, double beta2,
                     double eps, double weight_decay, double grad_clip, int64_t seed, int64_t stream) {
    using A = arithmetic<T>;
    const auto k = coefficients<A>(grad_norm(0), lr(0), step(0), beta1, beta2, eps, weight_decay, grad_clip);
    const auto word = [&](int64_t p, int which) {
        const uint32_t s = static_cast<uint32_t>(stream + which);
        return random_block(static_cast<uint64_t>(seed), static_cast<uint32_t>(step(0)), s, p / 4)
            .word[p % 4];
    };
    for (int64_t p = 0; p < weight.shape[0]; p++) {
        A mean = A(m(p)), square = A(v(p));
        const A updated = adamw_element(master ? master(p) : A(weight(p)), mean, square, A(grad(p)), k);
        if (master) {
            master(p) = updated;
            weight(p) = T(updated);
        } else {
            store_stochastic(&weight(p), updated, word(p, 0));
        }
        store_stochastic(&m(p), mean, word(p, 1));
        store_stochastic(&v(p), square, word(p, 2));
    }
}

// Elements a chunk: a multiple of the 4 that share a Philox block; its words stay in the first cache.
constexpr int64_t chunk = 1024;

inline void store_block(uint32_t* words, uint64_t seed, uint32_t step, uint32_t stream, int64_t block) {
    const Philox p = random_block(seed, step, stream, block);
    for (int i = 0; i < 4; i++) words[i] = p.word[i];
}

// The words of elements first .. first + chunk - 1; first is a multiple of 4.
void random_words(uint32_t* words, int64_t first, int64_t seed, int32_t step, int64_t stream) {
#pragma omp simd
    for (int64_t b = 0; b < chunk / 4; b++)
        store_block(words + 4 * b, static_cast<uint64_t>(seed), static_cast<uint32_t>(step),
                    static_cast<uint32_t>(stream), first / 4 + b);
}

template <bool has_master, class T, class G, class M>
void adamw_chunk(T* weight, float* master, M* m, M* v, const G* grad, const uint32_t* words, int64_t count,
                 const Coefficients<float>& k) {
#pragma omp simd
    for (int64_t p = 0; p < count; p++) {
        float mean = float(m[p]), square = float(v[p]);
        if constexpr (has_master) {
            master[p] = adamw_element(master[p], mean, square, float(grad[p]), k);
            store(weight + p, master[p]);
        } else {
            const float updated = adamw_element(float(weight[p]), mean, square, float(grad[p]), k);
            store_stochastic(weight + p, updated, words[p]);
        }
        store_stochastic(m + p, mean, words[chunk + p]);
        store_stochastic(v + p, square, words[2 * chunk + p]);
    }
}

template <class T, class G, class M>
void adamw_cpu(View<T, 1> weight, View<float, 1> master, View<M, 1> m, View<M, 1> v, View<const G, 1> grad,
               View<const float, 1> grad_norm, View<const float, 1> lr, View<const int32_t, 1> step,
               double beta1, double beta2, double eps, double weight_decay, double grad_clip, int64_t seed,
               int64_t stream) {
    const auto k =
        coefficients<float>(grad_norm(0), lr(0), step(0), beta1, beta2, eps, weight_decay, grad_clip);
    const int64_t P = weight.shape[0];
    const bool random_weight = sizeof(T) == 2 && !master, random_moments = sizeof(M) == 2;
#pragma omp parallel for
    for (int64_t begin = 0; begin < P; begin += chunk) {
        uint32_t words[3 * chunk];
        if (random_weight) random_words(words, begin, seed, step(0), stream);
        for (int i = 1; random_moments && i < 3; i++)
            random_words(words + i * chunk, begin, seed, step(0), stream + i);
        const auto update = master ? adamw_chunk<true, T, G, M> : adamw_chunk<false, T, G, M>;
        update(&weight(begin), master ? &master(begin) : nullptr, &m(begin), &v(begin), &grad(begin), words,
               std::min(chunk, P - begin), k);
    }
}

// What is updated in place is read and written; beside a master the stored weight is only written.
double adamw_bytes(const Call& c) {
    double bytes = 0;
    for (size_t i = 0; i < c.op->operands.size(); i++)
        if (c.tensor[i].data) bytes += double(c.tensor[i].bytes()) * (c.op->operands[i].in_place ? 2 : 1);
    return c.operand("master").data ? bytes - double(c.operand("weight").bytes()) : bytes;
}

Operation adamw(
    "adamw(weight ~: T[P], master? ~: A[P], m ~: M[P], v ~: M[P] >0;"
    " grad: G[P], grad_norm: A[1] >0, lr: A[1] >0, step: i32[1] >0;"
    " beta1: float, beta2: float, eps: float, weight_decay: float, grad_clip: float, seed: int, stream: int)",
    "one update: clipping, moments, decoupled weight decay, rounding to storage",
    {{"cpu", "fixed chunks over threads", Where::host,
      entries<adamw_cpu<float, float, float>, adamw_cpu<float, float, bf16>, adamw_cpu<bf16, float, float>,
              adamw_cpu<bf16, float, bf16>, adamw_cpu<bf16, bf16, float>, adamw_cpu<bf16, bf16, bf16>>()},
     {"reference", "plain loops", Where::host,
      entries<adamw_reference<float, float, float>, adamw_reference<float, float, bf16>,
              adamw_reference<bf16, float, float>, adamw_reference<bf16, float, bf16>,
              adamw_reference<bf16, bf16, float>, adamw_reference<bf16, bf16, bf16>,
              adamw_reference<double, double, double>>()}},
    [](const Call& c) { return 15.0 * c["P"]; }, adamw_bytes);

}  // namespace
}  // namespace llamac
