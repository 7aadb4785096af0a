// Utilities for vectorised loops of the `cpu` variants: rounding to storage, an exponential, an error function, a sum.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/tensor.h"

namespace llamac {

// *p = T(value). In the body of a `#pragma omp simd` loop, a temporary of class type keeps g++ from vectorising; in a function
// that is inlined later it does not.
template <class T>
inline void store(T* p, float value) {
    *p = T(value);
}

// e^x without call, table or branch, so that `#pragma omp simd` loops vectorise around it. Error up to 1.02
// ulp where the result is a normal number; 0 below, infinity from 2^127.5 on, NaN stays NaN.
// x = n ln2 + r, |r| <= ln2/2 (Cody and Waite: ln2 in two floats, so that n times the first is exact);
// e^r = 1 + r + r^2 p(r), p fitted to 3e-9 of e^r;
// 2^n by its exponent bits: adding 1.5 * 2^23 has left n in the low bits of a float.
inline float fast_exp(float x) {
    constexpr float magic = 12582912.0f;
    union {
        float f;
        uint32_t u;
    } shifted{x * 1.44269504f + magic}, power;
    const float n = shifted.f - magic;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    power.u = (shifted.u + 127u) << 23;
    float p = 1.3814599e-3f;
    p = p * r + 8.3687166e-3f;
    p = p * r + 4.1668389e-2f;
    p = p * r + 1.6666521e-1f;
    p = p * r + 0.49999994f;
    const float e = ((p * r) * r + r + 1.0f) * power.f;
    const float low = x < -87.3365f ? 0.0f : e;
    return x > 88.3762f ? std::numeric_limits<float>::infinity() : low;
}

// The error function by the same means as fast_exp. Error up to 1.6 ulp; NaN stays NaN.
// |x| < 0.95: x + x p(x^2), p fitted to 2.2e-8 of erf; above, 1 - e^-q(|x|), q fitted to 2.8e-9 of erf up to 4, where the
// result is 1.
inline float fast_erf(float x) {
    const float t = std::min(std::fabs(x), 4.0f), s = x * x;
    float p = -5.862086e-4f;
    p = p * s + 4.967508e-3f;
    p = p * s - 2.6748866e-2f;
    p = p * s + 1.12813205e-1f;
    p = p * s - 3.7612447e-1f;
    p = p * s + 1.2837914e-1f;
    float q = -2.128966e-4f;
    q = q * t + 3.2059238e-3f;
    q = q * t - 2.2860782e-2f;
    q = q * t + 1.0521594e-1f;
    q = q * t + 6.357535e-1f;
    q = q * t + 1.1285038f;
    const float above = std::copysign(1.0f - fast_exp(-q * t), x);
    return t < 0.95f ? x + x * p : above;
}

// term(0) + ... + term(n-1), term giving floats: 16 partial sums in float over 1024 terms, double over these
// blocks. One float sum over a vocabulary would lose more digits than PyTorch's; this order depends neither
// on the number of threads nor on the width of the vectors.
template <class Term>
double block_sum(int64_t n, Term term) {
    constexpr int64_t block = 1024, lanes = 16;
    double total = 0;
    for (int64_t begin = 0; begin < n; begin += block) {
        const int64_t end = std::min(n, begin + block);
        float sum[lanes] = {};
        int64_t i = begin;
        for (; i + lanes <= end; i += lanes)
#pragma omp simd
            for (int64_t k = 0; k < lanes; k++) sum[k] += term(i + k);
        for (int64_t k = 0; i < end; i++, k++) sum[k] += term(i);
        for (int64_t width = lanes / 2; width > 0; width /= 2)
            for (int64_t k = 0; k < width; k++) sum[k] += sum[k + width];
        total += sum[0];
    }
    return total;
}

}  // namespace llamac
