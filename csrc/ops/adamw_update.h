// AdamW as adamw.hip and adamw_quantize.hip compute it, with the same bits: the reference, chunks on the host, elements and
// units of eight in kernels. adamw.hip has the mathematics and the idea of each variant.
#pragma once
#include <cmath>
#include <limits>

#include "core/device.h"
#include "core/operation.h"
#include "core/random.h"
#include "core/simd.h"
#include "ops/adamw.h"

namespace llamac {

template <class A>
struct Coefficients {
    A beta1, rest1, beta2, rest2;  // rest = 1 - beta, rounded once: 1 - 0.999f has lost four digits
    A bias1, bias2;                // 1 / (1 - beta^step)
    A clip, lr, eps, decay;
};

// scale: of the gradients, null for 1.
template <class A>
Coefficients<A> coefficients(double squares, A lr, int32_t step, const A* scale, double beta1, double beta2,
                             double eps, double weight_decay, double grad_clip) {
    const double part = scale ? 1 / double(*scale) : 1;
    const A norm = A(std::sqrt(squares) * part);
    const double ratio = grad_clip > 0 ? grad_clip / (double(norm) + 1e-6) : 1.0;
    const double clip = ratio >= 1 ? 1 : ratio;  // NaN, too: the gradients are no better than their norm
    const double bias1 = 1 / (1 - std::pow(beta1, step)), bias2 = 1 / (1 - std::pow(beta2, step));
    return {A(beta1), A(1 - beta1),   A(beta2), A(1 - beta2), A(bias1),
            A(bias2), A(clip * part), lr,       A(eps),       A(weight_decay)};
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

// The lower 16 of an element's 32 random bits, 8 each for m and v.
__host__ __device__ inline uint32_t bits_for_m(uint32_t bits) {
    return (bits & 0xff00u) | 0x80u;
}
__host__ __device__ inline uint32_t bits_for_v(uint32_t bits) {
    return (bits << 8 & 0xff00u) | 0x80u;
}

// *p = value, rounded so where *p is narrower.
__host__ __device__ inline void store_stochastic(bf16* p, float value, uint32_t random) {
    p->bits = static_cast<uint16_t>(round_stochastic(value, random));
}
template <class T>
__host__ __device__ inline void store_stochastic(T* p, arithmetic<T> value, uint32_t) {
    *p = T(value);
}

// The number of an element within its tensor: of element offset + p, or, in a part that consists of runs of the tensor's elements,
// `distance` apart, the first of them at `start`, of that element of the part.
struct Numbering {
    int64_t offset, run = 0, distance = 0, start = 0;  // run 0: the whole tensor

    __host__ __device__ int64_t of(int64_t p) const {
        const int64_t element = offset + p;
        return run ? element / run * distance + start + element % run : element;
    }
};

template <class T, class G, class M>
void adamw_reference(View<T, 1> weight, View<arithmetic<T>, 1> master, View<M, 1> m, View<M, 1> v,
                     View<const G, 1> grad, View<const double, 1> squares, View<const arithmetic<T>, 1> lr,
                     View<const int32_t, 1> step, View<const double, 1> guard,
                     View<const arithmetic<T>, 1> scale, double beta1, double beta2, double eps,
                     double weight_decay, double grad_clip, int64_t seed, int64_t stream, int64_t offset,
                     int64_t run, int64_t distance, int64_t start) {
    using A = arithmetic<T>;
    if (is_skipped(squares(0), guard.data)) return;
    const auto k =
        coefficients<A>(squares(0), lr(0), step(0), scale.data, beta1, beta2, eps, weight_decay, grad_clip);
    for (int64_t p = 0; p < weight.shape[0]; p++) {
        const int64_t element = Numbering{offset, run, distance, start}.of(p);
        const Philox block = random_block(static_cast<uint64_t>(seed), static_cast<uint32_t>(step(0)),
                                          static_cast<uint32_t>(stream), element / 4);
        const uint32_t bits = block.bits[element % 4];
        A mean = A(m(p)), square = A(v(p));
        const A updated = adamw_element(master ? master(p) : A(weight(p)), mean, square, A(grad(p)), k);
        if (master) {
            master(p) = updated;
            weight(p) = T(updated);
        } else {
            store_stochastic(&weight(p), updated, bits >> 16);
        }
        store_stochastic(&m(p), mean, bits_for_m(bits));
        store_stochastic(&v(p), square, bits_for_v(bits));
    }
}

// Elements per chunk: a multiple of the 4 that share a Philox block; their random bits stay in the first cache.
constexpr int64_t chunk = 1024;

inline void store_block(uint32_t* bits, uint64_t seed, uint32_t step, uint32_t stream, int64_t block) {
    const Philox p = random_block(seed, step, stream, block);
    for (int i = 0; i < 4; i++) bits[i] = p.bits[i];
}

// The bits of `count` blocks from `first` on.
inline void random_bits(uint32_t* bits, int64_t first, int64_t count, int64_t seed, int32_t step,
                        int64_t stream) {
#pragma omp simd
    for (int64_t b = 0; b < count; b++)
        store_block(bits + 4 * b, static_cast<uint64_t>(seed), static_cast<uint32_t>(step),
                    static_cast<uint32_t>(stream), first + b);
}

// Not inlined, so that all callers compute the same bits.
template <bool has_master, class T, class G, class M>
[[gnu::noinline]] void adamw_chunk(T* weight, float* master, M* m, M* v, const G* grad, const uint32_t* bits,
                                   int64_t count, const Coefficients<float>& k) {
#pragma omp simd
    for (int64_t p = 0; p < count; p++) {
        float mean = float(m[p]), square = float(v[p]);
        if constexpr (has_master) {
            master[p] = adamw_element(master[p], mean, square, float(grad[p]), k);
            store(weight + p, master[p]);
        } else {
            const float updated = adamw_element(float(weight[p]), mean, square, float(grad[p]), k);
            store_stochastic(weight + p, updated, bits[p] >> 16);
        }
        store_stochastic(m + p, mean, bits_for_m(bits[p]));
        store_stochastic(v + p, square, bits_for_v(bits[p]));
    }
}

// In-place operands are read and written; beside a master the stored weight is only written.
inline double adamw_bytes(const Call& c) {
    double bytes = 0;
    for (size_t i = 0; i < c.op->operands.size(); i++)
        if (c.tensor[i].data) bytes += double(c.tensor[i].bytes()) * (c.op->operands[i].in_place ? 2 : 1);
    return c.operand("master").data ? bytes - double(c.operand("weight").bytes()) : bytes;
}

// ---- kernels

constexpr int philox_rounds = 10;

// The scalars of a call, as the kernels want them. key: 2 x 32 bits of Philox in each of its rounds: made here,
// they are constants of the launch, not additions of every thread. grad_of_scaled: rest1 of a gradient that is
// scaled by root_of_rest2.
struct Settings {
    float beta1, rest1, log_beta1, beta2, rest2, log_beta2, eps, decay, grad_clip, root_of_rest2,
        grad_of_scaled;
    uint64_t seed;
    uint32_t stream;
    int64_t offset;
    uint32_t key[philox_rounds][2];
};
inline Settings settings_of(double beta1, double beta2, double eps, double weight_decay, double grad_clip,
                            int64_t seed, int64_t stream, int64_t offset) {
    const auto f = [](double x) { return static_cast<float>(x); };
    Settings s{f(beta1),
               f(1 - beta1),
               f(std::log(beta1)),
               f(beta2),
               f(1 - beta2),
               f(std::log(beta2)),
               f(eps),
               f(weight_decay),
               f(grad_clip),
               f(std::sqrt(1 - beta2)),
               f((1 - beta1) / std::sqrt(1 - beta2)),
               static_cast<uint64_t>(seed),
               static_cast<uint32_t>(stream),
               offset,
               {}};
    uint32_t low = static_cast<uint32_t>(s.seed), high = static_cast<uint32_t>(s.seed >> 32);
    for (auto& key : s.key) {
        key[0] = low;
        key[1] = high;
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    return s;
}

// 1 - beta^step by expm1: the difference itself would lose the digits that count while step is small.
__device__ inline Coefficients<float> device_coefficients(const Settings& s, double squares, float lr,
                                                          int32_t step, const float* scale) {
    const float part = scale ? 1 / *scale : 1.0f;
    const float t = static_cast<float>(step), norm = static_cast<float>(sqrt(squares)) * part;
    const float ratio = s.grad_clip > 0 ? s.grad_clip / (norm + 1e-6f) : 1.0f;
    const float clip = ratio >= 1 ? 1 : ratio;
    return {s.beta1,
            s.rest1,
            s.beta2,
            s.rest2,
            -1.0f / expm1f(t * s.log_beta1),
            -1.0f / expm1f(t * s.log_beta2),
            clip * part,
            lr,
            s.eps,
            s.decay};
}

template <class T, class G, class M>
__global__ void adamw_naive_kernel(T* weight, float* master, M* m, M* v, const G* grad, const double* squares,
                                   const float* lr, const int32_t* step, const double* guard,
                                   const float* scale, Settings settings, Numbering numbering, int64_t P) {
    const int64_t p = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (p >= P || is_skipped(*squares, guard)) return;
    const Coefficients<float> k = device_coefficients(settings, *squares, *lr, *step, scale);
    const uint32_t now = static_cast<uint32_t>(*step);
    const float g = float(grad[p]) * k.clip, old = master ? master[p] : float(weight[p]);
    const float mean = k.beta1 * float(m[p]) + k.rest1 * g,
                square = k.beta2 * float(v[p]) + k.rest2 * (g * g);
    const float updated = old - k.lr * (mean * k.bias1 / (sqrtf(square * k.bias2) + k.eps) + k.decay * old);
    const int64_t element = numbering.of(p);
    const uint32_t bits = random_block(settings.seed, now, settings.stream, element / 4).bits[element % 4];
    if (master) {
        master[p] = updated;
        weight[p] = T(updated);
    } else {
        store_stochastic(weight + p, updated, bits >> 16);
    }
    store_stochastic(m + p, mean, bits_for_m(bits));
    store_stochastic(v + p, square, bits_for_v(bits));
}

constexpr int unit = 8;  // elements a thread: two Philox blocks

// A thread's unit is made of runs of `run` elements, the runs of a block's threads side by side: 8 where
// weights and moments are bf16, else 4, so that an f32 stream, too, is one 128-bit access a run and a warp's
// access has no gaps. (With 8, a warp's f32 store leaves half of every sector to the next: up to 8% slower.)
template <class T, class M, bool has_master>
constexpr int run_of = sizeof(T) + sizeof(M) == 4 && !has_master ? 8 : 4;

// The launch bounds: not the size of blocks (128 is best); by their product they leave a thread 56 registers
// of an NVIDIA multiprocessor's 65,536 with runs of 8, 64 with runs of 4. Fewer would be spilled; with runs
// of 8, 64 cost 2% and 72 cost 5%: fewer warps compute while others wait for memory. On AMD the second bound
// means waves a SIMD, and leaves more than the kernel takes.
template <int run>
constexpr int bound_threads = run == 8 ? 384 : 256;
template <int run>
constexpr int bound_blocks = run == 8 ? 3 : 4;

// x[first] begins a run of X as 128 bits, 64 for four of 16 bits, twice 128 for eight f32.
template <int run, class X>
__device__ inline void load_run(const X* x, float* values) {
    if constexpr (run == 4 && sizeof(X) == 2) {
        const uint2 bits = *reinterpret_cast<const uint2*>(x);
        float wide[8];
        unpack<X>(make_uint4(bits.x, bits.y, 0, 0), wide);
        for (int k = 0; k < 4; k++) values[k] = wide[k];
    } else {
        for (int first = 0; first < run; first += vector_size<X>) {
            float part[vector_size<X>];
            unpack<X>(load128(x + first), part);
            for (int k = 0; k < vector_size<X>; k++) values[first + k] = part[k];
        }
    }
}

// Two X of floats: rounded to nearest, or, where `cut`, their upper halves.
template <bool cut, class X>
__device__ inline uint32_t two_of(float low, float high) {
    if constexpr (cut)
        return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
    else
        return pair_bits<X>(low, high);
}
template <bool cut, int run, class X>
__device__ inline void store_run(X* x, const float* v) {
    if constexpr (sizeof(X) == 4) {
        for (int k = 0; k < run; k += 4) {
            const float part[4] = {v[k], v[k + 1], v[k + 2], v[k + 3]};
            store128(x + k, pack<float>(part));
        }
    } else {
        uint32_t two[run / 2];
        for (int k = 0; k < run / 2; k++) two[k] = two_of<cut, X>(v[2 * k], v[2 * k + 1]);
        if constexpr (run == 4)
            store_vector(reinterpret_cast<uint2*>(x), make_uint2(two[0], two[1]));
        else
            store128(x, make_uint4(two[0], two[1], two[2], two[3]));
    }
}

// Where a thread's runs begin, and how many elements there are.
template <int run>
struct Place {
    int64_t begin[unit / run];
    int64_t P;
    uint32_t block,
        high;  // the number of the thread block's first Philox block; `high` is the same for all of them
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
template <bool whole, bool cut, int run, class X>
__device__ inline void store_unit(X* x, const Place<run>& at, const float (&values)[unit]) {
    for (int r = 0; r < unit / run; r++) {
        if constexpr (whole) {
            store_run<cut, run>(x + at.begin[r], values + r * run);
        } else {
            for (int k = 0; k < run; k++) {
                const float value = values[r * run + k];
                if (at.begin[r] + k >= at.P) continue;
                if constexpr (cut)
                    x[at.begin[r] + k].bits = static_cast<uint16_t>(__float_as_uint(value) >> 16);
                else
                    x[at.begin[r] + k] = X(value);
            }
        }
    }
}

// philox of core/random.h for a unit's elements.
template <int run>
__device__ inline void random_unit(uint32_t (&bits)[unit], const Settings& s, uint32_t step,
                                   const Place<run>& at) {
#pragma unroll
    for (int first = 0; first < unit; first += 4) {
        const uint32_t runs = (first / run) * blockDim.x + threadIdx.x;
        uint32_t c0 = at.block + runs * (run / 4) + first % run / 4, c1 = at.high, c2 = s.stream, c3 = step;
#pragma unroll
        for (int round = 0; round < philox_rounds; round++) {
            const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
            c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ s.key[round][0];
            c1 = static_cast<uint32_t>(p1);
            c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ s.key[round][1];
            c3 = static_cast<uint32_t>(p0);
        }
        bits[first] = c0;
        bits[first + 1] = c1;
        bits[first + 2] = c2;
        bits[first + 3] = c3;
    }
}

// round_stochastic but for the cut, which storing makes; the value is not NaN, or the quiet one below.
__device__ inline float add_below(float value, uint32_t random) {
    return __uint_as_float(__float_as_uint(value) + random);
}
// A NaN whose upper half no addition below changes.
__device__ inline float quiet(float value) {
    return value != value ? __uint_as_float(0x7fc00000u) : value;
}

// Coefficients as a unit multiplies by them: the fewest instructions an element.
struct Factors {
    float grad;   // of a gradient, so that its square is rest2 g^2: clip sqrt(rest2)
    float root;   // of sqrt(v): sqrt(bias2)
    float rate;   // of m / (root sqrt(v) + eps): lr bias1; -infinity: the step is skipped
    float decay;  // of a weight: lr weight_decay
};
constexpr float skipped_rate = -std::numeric_limits<float>::infinity();
__device__ inline Factors factors_of(const Settings& s, const Coefficients<float>& k, bool skipped) {
    return {k.clip * s.root_of_rest2, sqrtf(k.bias2), skipped ? skipped_rate : k.lr * k.bias1,
            k.lr * k.decay};
}

// Updates and stores a loaded unit. w becomes the weight before it is rounded: to nearest if there is a master, else by a cut.
template <bool has_master, bool whole, int run, class T, class M>
__device__ inline void update_unit(T* weight, float* master, M* m, M* v, const Settings& s, const Factors& k,
                                   uint32_t now, const Place<run>& at, float (&w)[unit],
                                   const float (&g)[unit], float (&mean)[unit], float (&square)[unit]) {
    constexpr bool random_weight = !has_master && std::is_same_v<T, bf16>, random_moments = narrow<M>;
    float sum = 0;
    for (int e = 0; e < unit; e++) {
        const float scaled = g[e] * k.grad;
        // Which product a compiler would fuse with a sum may differ between the kernels that share this.
        mean[e] = fmaf(s.beta1, mean[e], s.grad_of_scaled * scaled);
        square[e] = fmaf(s.beta2, square[e], scaled * scaled);
        const float direction = mean[e] * fast_reciprocal(fmaf(k.root, fast_sqrt(square[e]), s.eps));
        w[e] = fmaf(-k.decay, w[e], w[e]);
        w[e] = fmaf(-k.rate, direction, w[e]);
        sum += w[e];
    }
    // A NaN in a moment is one in the weight and in the sum, too. scheduling_barrier: else the compiler makes 48
    // instructions that always run of a branch that is hardly ever taken.
    if ((random_weight || random_moments) && sum != sum) {
        scheduling_barrier();
        for (int e = 0; e < unit; e++) {
            if constexpr (random_weight) w[e] = quiet(w[e]);
            if constexpr (random_moments) {
                mean[e] = quiet(mean[e]);
                square[e] = quiet(square[e]);
            }
        }
    }
    uint32_t bits[unit];
    if constexpr (random_weight || random_moments) random_unit(bits, s, now, at);
    if constexpr (has_master) store_unit<whole, false>(master, at, w);
    if constexpr (random_weight)
        for (int e = 0; e < unit; e++) w[e] = add_below(w[e], bits[e] >> 16);
    store_unit<whole, random_weight>(weight, at, w);
    if constexpr (random_moments) {
        for (int e = 0; e < unit; e++) {
            mean[e] = add_below(mean[e], bits_for_m(bits[e]));
            square[e] = add_below(square[e], bits_for_v(bits[e]));
        }
    }
    store_unit<whole, random_moments>(m, at, mean);
    store_unit<whole, random_moments>(v, at, square);
}

// A thread's unit. One thread of a block computes the factors of the step while all loads are in flight, and puts them
// into LDS.
template <bool has_master, bool whole, int run, class T, class G, class M>
__device__ void adamw_unit(T* weight, float* master, M* m, M* v, const G* grad, const double* squares,
                           const float* lr, const int32_t* step, const double* guard, const float* scale,
                           const Settings& s, const Place<run>& at) {
    float w[unit], g[unit], mean[unit], square[unit];
    const auto load = [&] {
        if constexpr (has_master)
            load_unit<whole>(master, at, w);
        else
            load_unit<whole>(weight, at, w);
        load_unit<whole>(grad, at, g);
        load_unit<whole>(m, at, mean);
        load_unit<whole>(v, at, square);
        scheduling_barrier();
    };
    if constexpr (whole) load();
    Factors& shared = shared_memory<Factors>();
    if (threadIdx.x == 0)
        shared =
            factors_of(s, device_coefficients(s, *squares, *lr, *step, scale), is_skipped(*squares, guard));
    const uint32_t now = static_cast<uint32_t>(*step);
    __syncthreads();
    if constexpr (!whole) {
        if (at.begin[0] >= at.P) return;
        load();
    }
    const Factors k = shared;
    if (k.rate == skipped_rate) return;
    update_unit<has_master, whole>(weight, master, m, v, s, k, now, at, w, g, mean, square);
}

}  // namespace llamac
