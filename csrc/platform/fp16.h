// IEEE binary16 of a float and back, with the same bits by the devices' instructions and, elsewhere, by arithmetic without a
// branch, which vectorises (M. Dukhan, FP16). NaN stays NaN.
#pragma once
#include <bit>
#include <cstdint>

namespace llamac {

// To nearest, ties to even; beyond the largest number, infinity.
inline __host__ __device__ uint16_t fp16_bits(float value) {
#if defined(__CUDA_ARCH__)
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#elif defined(__HIP_DEVICE_COMPILE__)
    return __builtin_bit_cast(uint16_t, static_cast<_Float16>(value));
#else
    const uint32_t u = std::bit_cast<uint32_t>(value), size = u << 1, exponent = size & 0xff000000u;
    // Numbers beyond become infinity. The addition leaves the bits that stay, rounded, at the bottom of the sum.
    const float scaled = std::bit_cast<float>(u & 0x7fffffffu) * 0x1p112f * 0x1p-110f;
    const uint32_t least = exponent < 0x71000000u ? 0x71000000u : exponent;
    const uint32_t sum = std::bit_cast<uint32_t>(std::bit_cast<float>((least >> 1) + 0x07800000u) + scaled);
    const uint32_t rounded = (sum >> 13 & 0x7c00u) + (sum & 0x0fffu);
    return static_cast<uint16_t>((u >> 16 & 0x8000u) | (size > 0xff000000u ? 0x7e00u : rounded));
#endif
}
inline __host__ __device__ float fp16_value(uint16_t bits) {
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#elif defined(__HIP_DEVICE_COMPILE__)
    return static_cast<float>(__builtin_bit_cast(_Float16, bits));
#else
    const uint32_t u = uint32_t{bits} << 16, size = u << 1;
    const float normal = std::bit_cast<float>((size >> 4) + 0x70000000u) * 0x1p-112f;
    const float subnormal = std::bit_cast<float>(size >> 17 | 0x3f000000u) - 0.5f;
    return std::bit_cast<float>((u & 0x80000000u) |
                                std::bit_cast<uint32_t>(size < 0x08000000u ? subnormal : normal));
#endif
}
// Two, low half first.
inline __host__ __device__ uint32_t fp16_pair(float low, float high) {
#if defined(__CUDA_ARCH__)
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return fp16_bits(low) | uint32_t{fp16_bits(high)} << 16;
#endif
}

}  // namespace llamac
