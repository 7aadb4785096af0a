// Philox4x32-10, a counter-based random number generator: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2,
// 3", SC11. The same (seed, step, stream, element) gives the same bits on every device and with any number of
// threads.
#pragma once
#include <cmath>

#include "platform/hip.h"

namespace llamac {

struct Philox {
    uint32_t bits[4];
};

// Streams: parameter k has 4k; sampling and masked tokens have the last ones.
constexpr uint32_t sampling_stream = 0xffffffffu, masking_stream = 0xfffffffeu;

__host__ __device__ inline Philox philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
        c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(p1);
        c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// The 4 x 32 random bits of elements 4*block .. 4*block+3.
__host__ __device__ inline Philox random_block(uint64_t seed, uint32_t step, uint32_t stream, int64_t block) {
    return philox(seed, static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), stream, step);
}

// In (0, 1): never 0, so that its logarithm is finite.
__host__ __device__ inline double uniform(uint32_t bits) {
    return (bits + 0.5) * (1.0 / 4294967296.0);
}

// a * b in a form that no compiler fuses with an addition of the result: the sums below have the same bits on every device, and
// in Python, which has no fused multiply-add.
__host__ __device__ inline double product(double a, double b) {
    return fma(a, b, 0.0);
}

// The natural logarithm of 0 < u < 1, from u = 2^e m with m around 1 and log m = 2 atanh s, s = (m - 1) / (m + 1). Here and
// below, terms of the series less than 2^-55 of the sum are left out.
__host__ __device__ inline double log_of_fraction(double u) {
    int e;
    double m = frexp(u, &e);
    if (m < 0.70710678118654752) m *= 2, e--;
    const double s = (m - 1) / (m + 1), z = product(s, s);
    double series = 1.0 / 21;
#pragma unroll
    for (int n = 19; n >= 3; n -= 2) series = product(series, z) + 1.0 / n;
    return product(e, 0.69314718055994530942) + (2 * s + product(2 * s, product(z, series)));
}

// Cosine and sine of 2 pi u, 0 < u < 1.
struct UnitVector {
    double cosine, sine;
};
__host__ __device__ inline UnitVector unit_vector(double u) {
    // pi/2 in two parts; a quarter turn times the first, of 33 bits, is exact.
    constexpr double half_pi = 1.57079632673412561417, half_pi_rest = 6.07710050650619224932e-11;
    const double quarters = rint(4 * u), angle = product(6.28318530717958647693, u);
    const double x = angle - product(quarters, half_pi) - product(quarters, half_pi_rest), xx = product(x, x);
    double cosine = 1, sine = 1;
#pragma unroll
    for (int n = 16; n >= 2; n -= 2) {
        cosine = 1 - product(cosine, xx * (1.0 / (n * (n - 1))));
        sine = 1 - product(sine, xx * (1.0 / (n * (n + 1))));
    }
    sine = product(sine, x);
    const int quadrant = static_cast<int>(quarters) & 3;
    const double c = quadrant & 1 ? sine : cosine, s = quadrant & 1 ? cosine : sine;
    return {quadrant == 1 || quadrant == 2 ? -c : c, quadrant >= 2 ? -s : s};
}

// Two standard normal numbers of 2 x 32 bits: Box and Muller, in double, rounded to float.
struct NormalPair {
    float even, odd;
};
__host__ __device__ inline NormalPair normal_pair(uint32_t first, uint32_t second) {
    const double radius = sqrt(-2 * log_of_fraction(uniform(first)));
    const UnitVector direction = unit_vector(uniform(second));
    return {static_cast<float>(radius * direction.cosine), static_cast<float>(radius * direction.sine)};
}
// The standard normal number of one element: those of a pair have consecutive numbers, the first an even one.
__host__ __device__ inline float random_normal(uint64_t seed, uint32_t step, uint32_t stream,
                                               int64_t element) {
    const Philox p = random_block(seed, step, stream, element / 4);
    const bool upper = element % 4 >= 2;
    const NormalPair pair = normal_pair(upper ? p.bits[2] : p.bits[0], upper ? p.bits[3] : p.bits[1]);
    return element % 2 ? pair.odd : pair.even;
}

}  // namespace llamac
