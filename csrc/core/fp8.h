// The 8-bit floating-point types of matrix products: a sign, 7 - mantissa_bits bits of exponent, mantissa_bits of mantissa.
//
//                 exponent bias   largest   no finite value
//   e4m3               7            448     NaN: S.1111.111
//   e5m2              15          57344     as IEEE: S.11111.00 infinity, S.11111.01 to 11 NaN
//   e4m3fnuz           8            240     NaN: 1.0000.000, the only one; there is no negative zero
//   e5m2fnuz          16          57344     likewise
//
// NVIDIA's matrix units and gfx950 take the first two (Open Compute Project, "8-bit Floating Point Specification", 2023),
// MI300X (gfx942) takes the last two (Noune et al., "8-bit Numerical Formats for Deep Neural Networks", 2022).
#pragma once
#include "platform/hip.h"

namespace llamac {

template <int mantissa_bits, bool fnuz>
struct fp8 {
    static constexpr int mantissa = mantissa_bits;
    static constexpr bool is_fnuz = fnuz;
    static constexpr int bias = (1 << (6 - mantissa_bits)) - (fnuz ? 0 : 1);
    // e4m3 gives up one code of its largest binade for NaN, e5m2 the whole binade, fnuz nothing.
    static constexpr uint8_t largest_bits = fnuz ? 0x7f : mantissa_bits == 3 ? 0x7e : 0x7b;
    static constexpr uint8_t nan_bits = fnuz ? 0x80 : 0x7f;
    // The binades of the largest value and of the smallest normal one.
    static constexpr int largest_exponent = (largest_bits >> mantissa_bits) - bias,
                         smallest_exponent = 1 - bias;
    static constexpr float largest =
        static_cast<float>((1 << mantissa_bits) | (largest_bits & ((1 << mantissa_bits) - 1))) *
        static_cast<float>(1 << (largest_exponent - mantissa_bits));

    uint8_t bits;

    fp8() = default;
    // To nearest, ties to even; larger values and infinity become the largest value; NaN stays NaN.
    __host__ __device__ explicit fp8(float value) {
        union {
            float f;
            uint32_t u;
        } v{value}, limit{largest}, shifted;
        const uint32_t sign = v.u >> 24 & 0x80u;
        v.u &= 0x7fffffffu;
        uint32_t code;
        if (v.u > 0x7f800000u) {
            bits = nan_bits;
            return;
        }
        if (v.u >= limit.u) {
            code = largest_bits;
        } else if (v.u < static_cast<uint32_t>(127 + smallest_exponent) << 23) {
            // Below the normal numbers all steps are the same: adding a number whose last bit is worth one rounds to it.
            union {
                uint32_t u;
                float f;
            } one_step{static_cast<uint32_t>(127 + 23 + smallest_exponent - mantissa_bits) << 23};
            shifted.f = v.f + one_step.f;
            code = shifted.u - one_step.u;
        } else {
            constexpr int dropped = 23 - mantissa_bits;
            const uint32_t rounded = v.u + ((1u << (dropped - 1)) - 1) + (v.u >> dropped & 1u);
            code = (rounded >> dropped) - (static_cast<uint32_t>(127 - bias) << mantissa_bits);
        }
        bits = static_cast<uint8_t>(code | (fnuz && code == 0 ? 0 : sign));
    }
    __host__ __device__ operator float() const {
        const uint32_t code = bits & 0x7fu, exponent = code >> mantissa_bits;
        union Word {
            uint32_t u;
            float f;
        } v{(code << (23 - mantissa_bits)) + (static_cast<uint32_t>(127 - bias) << 23)};
        // A number of the lowest binade lacks the leading 1 that v has. Selected, as threads would diverge at branches.
        const Word smallest_normal{static_cast<uint32_t>(127 + smallest_exponent) << 23},
            one_up{v.u + (uint32_t{1} << 23)};
        v.f = exponent == 0 ? one_up.f - smallest_normal.f : v.f;
        const bool infinite = !fnuz && mantissa_bits == 2 && code == 0x7cu;
        if (fnuz ? bits == nan_bits : code > largest_bits) v.u = infinite ? 0x7f800000u : 0x7fc00000u;
        v.u |= static_cast<uint32_t>(fnuz && bits == nan_bits ? 0 : bits & 0x80u) << 24;
        return v.f;
    }
};
using e4m3 = fp8<3, false>;
using e5m2 = fp8<2, false>;
using e4m3fnuz = fp8<3, true>;
using e5m2fnuz = fp8<2, true>;
static_assert(sizeof(e4m3) == 1 && e4m3::largest == 448 && e5m2::largest == 57344 &&
              e4m3fnuz::largest == 240 && e5m2fnuz::largest == 57344);

// The largest power of two by which numbers up to amax stay within the limit: it multiplies exactly, and so does its
// inverse. amax, limit: positive and finite.
__host__ __device__ inline float fp8_scale(float amax, float limit) {
    union {
        float f;
        uint32_t u;
    } a{amax}, b{limit}, scale;
    const int exponent = static_cast<int>(b.u >> 23) - static_cast<int>(a.u >> 23) -
                         ((a.u & 0x7fffffu) > (b.u & 0x7fffffu) ? 1 : 0);
    constexpr int most = 126;  // of the inverse, too
    scale.u = static_cast<uint32_t>(127 + (exponent < -most  ? -most
                                           : exponent > most ? most
                                                             : exponent))
              << 23;
    return scale.f;
}

}  // namespace llamac
