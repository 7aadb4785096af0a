// The matrix instructions of NVIDIA, sm_80 and newer.
#pragma once

namespace llamac {

#if defined(__CUDACC__)
// One instruction by its shape and the types of a and b.
#define LLAMAC_MMA(TYPES)                                                                      \
    asm("mma.sync.aligned." TYPES ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <class E>
__device__ void mma_m16n8k16(float* c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (E::mantissa == 7)
        LLAMAC_MMA("m16n8k16.row.col.f32.bf16.bf16");
    else
        LLAMAC_MMA("m16n8k16.row.col.f32.f16.f16");
}
// Whether the matrix units multiply F of core/fp8.h.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
template <class F>
constexpr bool multiplies_fp8 = !F::is_fnuz;
#else
template <class F>
constexpr bool multiplies_fp8 = false;
#endif
// A, B: of core/fp8.h.
template <class A, class B>
__device__ void mma_m16n8k32(float* c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (A::mantissa == 3 && B::mantissa == 3)
        LLAMAC_MMA("m16n8k32.row.col.f32.e4m3.e4m3");
    else if constexpr (A::mantissa == 3)
        LLAMAC_MMA("m16n8k32.row.col.f32.e4m3.e5m2");
    else if constexpr (B::mantissa == 3)
        LLAMAC_MMA("m16n8k32.row.col.f32.e5m2.e4m3");
    else
        LLAMAC_MMA("m16n8k32.row.col.f32.e5m2.e5m2");
}
#undef LLAMAC_MMA
// The same address; offsets are added last, in the instruction that uses it.
inline __device__ SharedAddress settled(SharedAddress p) {
    asm("" : "+r"(p));
    return p;
}
// Four 8x8 matrices of 16 bits; lane l brings the address of row l % 8 of matrix l / 8.
template <bool transposed>
__device__ void ldmatrix(uint32_t (&out)[4], SharedAddress address) {
    if constexpr (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(address)
                     : "memory");
}
template <int>
__device__ void set_priority() {}
#endif

}  // namespace llamac
