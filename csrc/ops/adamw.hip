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
// stream, element): the upper half of stream's word for the weight, the two halves of stream + 1's for m and
// v. The update itself uses m and v before they are rounded.
//
// reference: plain loops.
// cpu:       fixed chunks over threads; the random words of a chunk come first, four elements a Philox block.
// 1          naive: a thread an element.
// 2          eight elements a thread, 128-bit accesses, all of a step's loads in flight before the first is
//            used; the grid stays resident, so that what depends on the step alone is computed once a thread.
//            What limits it where everything is bf16 is arithmetic as much as memory: 14 bytes and two Philox
//            words an element.
//
// NVIDIA H200, bf16 where nothing is said, 2026-11-21, `make bench`; %: of what a copy of as many bytes does
// there and then; compile: torch.compile's time over ours (PyTorch 2.11):
//
//   adamw T=bf16 G=f32 M=f32, no master P=268435456:
//     kernel 1 2.7947 ms, kernel 2 1.5925 ms, 4046 GB/s, 97.8%, compile 0.95
//   adamw T=bf16 G=f32 M=bf16, no master P=268435456:
//     kernel 1 3.8817 ms, kernel 2 1.0710 ms, 4010 GB/s, 97.1%, compile 0.93
//   adamw T=bf16 G=bf16 M=f32, no master P=268435456:
//     kernel 1 2.7601 ms, kernel 2 1.4747 ms, 4005 GB/s, 96.8%, compile 0.94
//   adamw T=bf16 G=bf16 M=bf16, no master P=268435456:
//     kernel 1 3.8795 ms, kernel 2 0.9682 ms, 3881 GB/s, 90.6%, compile 0.91
//   adamw T=bf16 G=f32 M=f32 P=268435456:
//     kernel 1 2.0860 ms, kernel 2 2.0084 ms, 4010 GB/s, 93.1%, compile 0.95
//   adamw T=bf16 G=f32 M=bf16 P=268435456:
//     kernel 1 2.8891 ms, kernel 2 1.4709 ms, 4015 GB/s, 97.1%, compile 0.95
//   adamw T=bf16 G=bf16 M=f32 P=268435456:
//     kernel 1 2.0215 ms, kernel 2 1.8873 ms, 3982 GB/s, 96.2%, compile 0.95
//   adamw T=bf16 G=bf16 M=bf16 P=268435456:
//     kernel 1 2.8909 ms, kernel 2 1.3574 ms, 3955 GB/s, 95.6%, compile 0.94
//   adamw T=bf16 G=f32 M=f32, no master P=16777216:
//     kernel 1 0.1744 ms, kernel 2 0.1024 ms, 3932 GB/s, 94.5%, compile -
//   adamw T=bf16 G=f32 M=bf16, no master P=16777216:
//     kernel 1 0.2459 ms, kernel 2 0.0691 ms, 3885 GB/s, 94.8%, compile -
//   adamw T=bf16 G=bf16 M=f32, no master P=16777216:
//     kernel 1 0.1750 ms, kernel 2 0.0951 ms, 3882 GB/s, 93.4%, compile -
//   adamw T=bf16 G=bf16 M=bf16, no master P=16777216:
//     kernel 1 0.2462 ms, kernel 2 0.0641 ms, 3664 GB/s, 90.4%, compile -
//   adamw T=bf16 G=f32 M=f32 P=16777216: kernel 1 0.1346 ms, kernel 2 0.1284 ms, 3918 GB/s, 93.3%, compile -
//   adamw T=bf16 G=f32 M=bf16 P=16777216: kernel 1 0.1844 ms, kernel 2 0.0947 ms, 3897 GB/s, 93.9%, compile -
//   adamw T=bf16 G=bf16 M=f32 P=16777216: kernel 1 0.1296 ms, kernel 2 0.1210 ms, 3881 GB/s, 92.7%, compile -
//   adamw T=bf16 G=bf16 M=bf16 P=16777216:
//     kernel 1 0.1844 ms, kernel 2 0.0880 ms, 3814 GB/s, 92.5%, compile -
#include <algorithm>
#include <cmath>

#include "core/device.h"
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

// The bf16 that 16 random bits below those that stay, then cut, make of a value; infinity and NaN stay.
__host__ __device__ inline uint32_t round_stochastic(float value, uint32_t random) {
    union {
        float f;
        uint32_t u;
    } bits{value};
    return value != value ? 0x7fc0u : (bits.u + random) >> 16;
}

// *p = value, rounded so where T is bf16.
template <class T>
__host__ __device__ inline void store_stochastic(T* p, arithmetic<T> value, uint32_t random) {
    if constexpr (sizeof(T) == 2)
        p->bits = static_cast<uint16_t>(round_stochastic(value, random));
    else
        *p = value;
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
            store_stochastic(&weight(p), updated, word(p, 0) >> 16);
        }
        store_stochastic(&m(p), mean, word(p, 1) >> 16);
        store_stochastic(&v(p), square, word(p, 1) & 0xffffu);
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
            store_stochastic(weight + p, updated, words[p] >> 16);
        }
        store_stochastic(m + p, mean, words[chunk + p] >> 16);
        store_stochastic(v + p, square, words[chunk + p] & 0xffffu);
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
        uint32_t words[2 * chunk];
        if (random_weight) random_words(words, begin, seed, step(0), stream);
        if (random_moments) random_words(words + chunk, begin, seed, step(0), stream + 1);
        const auto update = master ? adamw_chunk<true, T, G, M> : adamw_chunk<false, T, G, M>;
        update(&weight(begin), master ? &master(begin) : nullptr, &m(begin), &v(begin), &grad(begin), words,
               std::min(chunk, P - begin), k);
    }
}

// ---- kernels

// The scalars of a call, as the kernels want them.
struct Settings {
    float beta1, rest1, log_beta1, beta2, rest2, log_beta2, eps, decay, grad_clip;
    uint64_t seed;
    uint32_t stream;
};
Settings settings_of(double beta1, double beta2, double eps, double weight_decay, double grad_clip,
                     int64_t seed, int64_t stream) {
    const auto f = [](double x) { return static_cast<float>(x); };
    return {f(beta1),
            f(1 - beta1),
            f(std::log(beta1)),
            f(beta2),
            f(1 - beta2),
            f(std::log(beta2)),
            f(eps),
            f(weight_decay),
            f(grad_clip),
            static_cast<uint64_t>(seed),
            static_cast<uint32_t>(stream)};
}

// 1 - beta^step by expm1: the difference itself would lose the digits that count while step is small.
__device__ inline Coefficients<float> device_coefficients(const Settings& s, float grad_norm, float lr,
                                                          int32_t step) {
    const float t = static_cast<float>(step);
    const float clip = s.grad_clip > 0 ? fminf(1.0f, s.grad_clip / (grad_norm + 1e-6f)) : 1.0f;
    return {
        s.beta1, s.rest1, s.beta2, s.rest2, -1.0f / expm1f(t * s.log_beta1), -1.0f / expm1f(t * s.log_beta2),
        clip,    lr,      s.eps,   s.decay};
}

template <class T, class G, class M>
__global__ void adamw_kernel1(T* weight, float* master, M* m, M* v, const G* grad, const float* grad_norm,
                              const float* lr, const int32_t* step, Settings settings, int64_t P) {
    const int64_t p = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (p >= P) return;
    const Coefficients<float> k = device_coefficients(settings, *grad_norm, *lr, *step);
    const uint32_t now = static_cast<uint32_t>(*step);
    const float g = float(grad[p]) * k.clip, old = master ? master[p] : float(weight[p]);
    const float mean = k.beta1 * float(m[p]) + k.rest1 * g,
                square = k.beta2 * float(v[p]) + k.rest2 * (g * g);
    const float updated = old - k.lr * (mean * k.bias1 / (sqrtf(square * k.bias2) + k.eps) + k.decay * old);
    if (master) {
        master[p] = updated;
        weight[p] = T(updated);
    } else {
        const uint32_t word = random_block(settings.seed, now, settings.stream, p / 4).word[p % 4];
        store_stochastic(weight + p, updated, word >> 16);
    }
    const uint32_t word = random_block(settings.seed, now, settings.stream + 1, p / 4).word[p % 4];
    store_stochastic(m + p, mean, word >> 16);
    store_stochastic(v + p, square, word & 0xffffu);
}

template <class T, class G, class M>
void adamw_1(View<T, 1> weight, View<float, 1> master, View<M, 1> m, View<M, 1> v, View<const G, 1> grad,
             View<const float, 1> grad_norm, View<const float, 1> lr, View<const int32_t, 1> step,
             double beta1, double beta2, double eps, double weight_decay, double grad_clip, int64_t seed,
             int64_t stream, Device device) {
    const int64_t P = weight.shape[0];
    launch(Grid(blocks_for(P, device.threads), device.threads, device.stream), adamw_kernel1<T, G, M>,
           weight.data, master.data, m.data, v.data, grad.data, grad_norm.data, lr.data, step.data,
           settings_of(beta1, beta2, eps, weight_decay, grad_clip, seed, stream), P);
}

constexpr int unit = 8;  // elements a thread at a time: two Philox blocks
constexpr int kernel2_threads = 256;

// A thread's unit is made of runs of `run` elements, the runs of a block's threads side by side: 8 where
// every stream is bf16, else 4, so that an f32 stream, too, is one 128-bit access a run and a warp's access
// has no gaps. (With runs of 8, a warp's f32 store leaves half of every sector to the next one: 15% slower.)
// x[first] begins a run of X as 128 bits, or 64 for four bf16.
template <int run, class X>
__device__ inline void load_run(const X* x, float* values) {
    if constexpr (run == 4 && sizeof(X) == 2) {
        const uint2 bits = *reinterpret_cast<const uint2*>(x);
        float wide[8];
        unpack(make_uint4(bits.x, bits.y, 0, 0), wide);
        for (int k = 0; k < 4; k++) values[k] = wide[k];
    } else {
        float part[vector_size<X>];
        unpack(load128(x), part);
        for (int k = 0; k < run; k++) values[k] = part[k];
    }
}
template <int run, class X>
__device__ inline void store_run(X* x, const float* values) {
    if constexpr (run == 4 && sizeof(X) == 2) {
        store_vector(reinterpret_cast<uint2*>(x),
                     make_uint2(bf16_pair(values[0], values[1]), bf16_pair(values[2], values[3])));
    } else {
        float part[vector_size<X>];
        for (int k = 0; k < run; k++) part[k] = values[k];
        store128(x, pack(part));
    }
}

// Where a thread's runs begin, and how many elements there are.
template <int run>
struct Place {
    int64_t begin[unit / run];
    int64_t P;
};
// whole: all elements are there, and at the borders that the accesses want.
template <bool whole, int run, class X>
__device__ inline void load_unit(const X* x, const Place<run>& at, float (&values)[unit]) {
    for (int r = 0; r < unit / run; r++) {
        if constexpr (whole) {
            load_run<run>(x + at.begin[r], values + r * run);
        } else {
            for (int k = 0; k < run; k++) {
                // Past the end, the thread's own first again, which no other thread writes: no branch, and it
                // is not stored.
                const int64_t p = at.begin[r] + k;
                values[r * run + k] = float(x[p < at.P ? p : at.begin[0]]);
            }
        }
    }
}
template <bool whole, int run, class X>
__device__ inline void store_unit(X* x, const Place<run>& at, const float (&values)[unit]) {
    for (int r = 0; r < unit / run; r++) {
        if constexpr (whole) {
            store_run<run>(x + at.begin[r], values + r * run);
        } else {
            for (int k = 0; k < run; k++)
                if (at.begin[r] + k < at.P) x[at.begin[r] + k] = X(values[r * run + k]);
        }
    }
}

// What the random bits make of the values, so that packing them rounds no more.
template <class X>
__device__ inline void round_unit(float (&values)[unit], const uint32_t (&random)[unit]) {
    if constexpr (sizeof(X) == 2)
        for (int k = 0; k < unit; k++)
            values[k] = __uint_as_float(round_stochastic(values[k], random[k]) << 16);
}
template <int run>
__device__ inline void random_unit(uint32_t (&words)[unit], const Settings& s, uint32_t step, uint32_t stream,
                                   const Place<run>& at) {
    for (int first = 0; first < unit; first += 4) {
        const Philox block = random_block(s.seed, step, stream, (at.begin[first / run] + first % run) / 4);
        for (int k = 0; k < 4; k++) words[first + k] = block.word[k];
    }
}

template <bool has_master, bool whole, int run, class T, class G, class M>
__device__ void adamw_unit(T* weight, float* master, M* m, M* v, const G* grad, const Coefficients<float>& k,
                           const Settings& s, uint32_t step, const Place<run>& at) {
    constexpr float tiny = 1e-37f;  // far below eps^2; keeps 0 * rsqrt(0) out
    float w[unit], g[unit], mean[unit], square[unit];
    if constexpr (has_master)
        load_unit<whole>(master, at, w);
    else
        load_unit<whole>(weight, at, w);
    load_unit<whole>(grad, at, g);
    load_unit<whole>(m, at, mean);
    load_unit<whole>(v, at, square);
    for (int e = 0; e < unit; e++) {
        const float clipped = g[e] * k.clip;
        mean[e] = k.beta1 * mean[e] + k.rest1 * clipped;
        square[e] = k.beta2 * square[e] + k.rest2 * (clipped * clipped);
        const float scaled = fmaxf(square[e] * k.bias2, tiny), root = scaled * rsqrtf(scaled);
        w[e] -= k.lr * (__fdividef(mean[e] * k.bias1, root + k.eps) + k.decay * w[e]);
    }
    uint32_t words[unit];
    if constexpr (has_master) {
        store_unit<whole>(master, at, w);
    } else if constexpr (sizeof(T) == 2) {
        random_unit(words, s, step, s.stream, at);
        for (uint32_t& word : words) word >>= 16;
        round_unit<T>(w, words);
    }
    store_unit<whole>(weight, at, w);
    if constexpr (sizeof(M) == 2) {
        uint32_t low[unit];
        random_unit(words, s, step, s.stream + 1, at);
        for (int e = 0; e < unit; e++) {
            low[e] = words[e] & 0xffffu;
            words[e] >>= 16;
        }
        round_unit<M>(mean, words);
        round_unit<M>(square, low);
    }
    store_unit<whole>(m, at, mean);
    store_unit<whole>(v, at, square);
}

template <class T, class G, class M, bool aligned, bool has_master>
__global__ void __launch_bounds__(kernel2_threads)
    adamw_kernel2(T* weight, float* master, M* m, M* v, const G* grad, const float* grad_norm,
                  const float* lr, const int32_t* step, Settings settings, int64_t P) {
    constexpr int run = sizeof(T) + sizeof(G) + sizeof(M) == 6 && !has_master ? 8 : 4;
    const Coefficients<float> k = device_coefficients(settings, *grad_norm, *lr, *step);
    const uint32_t now = static_cast<uint32_t>(*step);
    const int64_t width = int64_t{blockDim.x} * unit;
    for (int64_t base = blockIdx.x * width; base < P; base += gridDim.x * width) {
        Place<run> at{{}, P};
        for (int r = 0; r < unit / run; r++)
            at.begin[r] = base + (int64_t{r} * blockDim.x + threadIdx.x) * run;
        if (at.begin[0] >= P) return;
        if (aligned && base + width <= P)
            adamw_unit<has_master, true>(weight, master, m, v, grad, k, settings, now, at);
        else
            adamw_unit<has_master, false>(weight, master, m, v, grad, k, settings, now, at);
    }
}

template <class T, class G, class M>
void adamw_2(View<T, 1> weight, View<float, 1> master, View<M, 1> m, View<M, 1> v, View<const G, 1> grad,
             View<const float, 1> grad_norm, View<const float, 1> lr, View<const int32_t, 1> step,
             double beta1, double beta2, double eps, double weight_decay, double grad_clip, int64_t seed,
             int64_t stream, Device device) {
    const int64_t P = weight.shape[0];
    const bool aligned = is_whole({weight.data, master.data, m.data, v.data, grad.data}, 0, unit);
    const auto kernel =
        master    ? aligned ? adamw_kernel2<T, G, M, true, true> : adamw_kernel2<T, G, M, false, true>
        : aligned ? adamw_kernel2<T, G, M, true, false>
                  : adamw_kernel2<T, G, M, false, false>;
    const int64_t resident =
        int64_t{device_properties().multiprocessors} * resident_blocks(kernel, device.threads, 0);
    const int64_t blocks = std::min<int64_t>(resident, blocks_for(P, int64_t{unit} * device.threads));
    launch(Grid(static_cast<unsigned>(blocks), device.threads, device.stream), kernel, weight.data,
           master.data, m.data, v.data, grad.data, grad_norm.data, lr.data, step.data,
           settings_of(beta1, beta2, eps, weight_decay, grad_clip, seed, stream), P);
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
     {"2",
      "eight elements a thread, 128-bit accesses",
      Where::device,
      entries<adamw_2<float, float, float>, adamw_2<float, float, bf16>, adamw_2<bf16, float, float>,
              adamw_2<bf16, float, bf16>, adamw_2<bf16, bf16, float>, adamw_2<bf16, bf16, bf16>>(),
      nullptr,
      {256, 128}},
     {"1", "naive: a thread an element", Where::device,
      entries<adamw_1<float, float, float>, adamw_1<float, float, bf16>, adamw_1<bf16, float, float>,
              adamw_1<bf16, float, bf16>, adamw_1<bf16, bf16, float>, adamw_1<bf16, bf16, bf16>>()},
     {"reference", "plain loops", Where::host,
      entries<adamw_reference<float, float, float>, adamw_reference<float, float, bf16>,
              adamw_reference<bf16, float, float>, adamw_reference<bf16, float, bf16>,
              adamw_reference<bf16, bf16, float>, adamw_reference<bf16, bf16, bf16>,
              adamw_reference<double, double, double>>()}},
    [](const Call& c) { return 15.0 * c["P"]; }, adamw_bytes);

}  // namespace
}  // namespace llamac
