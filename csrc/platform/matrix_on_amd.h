// The matrix instructions of AMD: MFMA on gfx90a, gfx942 and gfx950, WMMA on gfx11.
#pragma once

namespace llamac {

#if defined(__HIPCC__)
template <class Element, int n>
using Native = Element __attribute__((ext_vector_type(n)));

#if defined(__GFX11__)
// 16x16x16; lanes 16 to 31 bring the same rows as lanes 0 to 15.
template <class E>
__device__ void wmma(float (&c)[8], const uint32_t (&a)[8], const uint32_t (&b)[8]) {
    using Half = Native<std::conditional_t<E::mantissa == 7, short, _Float16>, 16>;
    using Sums = Native<float, 8>;
    const Half rows = __builtin_bit_cast(Half, a), columns = __builtin_bit_cast(Half, b);
    Sums sums = __builtin_bit_cast(Sums, c);
    if constexpr (E::mantissa == 7)
        sums = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(rows, columns, sums);
    else
        sums = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(rows, columns, sums);
    for (int i = 0; i < 8; i++) c[i] = sums[i];
}
#else
// 16 x 16, 16 deep.
template <class E>
__device__ void mfma(float (&c)[4], const uint32_t (&a)[2], const uint32_t (&b)[2]) {
    using Half = Native<std::conditional_t<E::mantissa == 7, short, _Float16>, 4>;
    using Sums = Native<float, 4>;
    Sums sums;
    for (int i = 0; i < 4; i++) sums[i] = c[i];
    const Half rows = __builtin_bit_cast(Half, a), columns = __builtin_bit_cast(Half, b);
    if constexpr (E::mantissa == 7)
        sums = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(rows, columns, sums, 0, 0, 0);
    else
        sums = __builtin_amdgcn_mfma_f32_16x16x16f16(rows, columns, sums, 0, 0, 0);
    for (int i = 0; i < 4; i++) c[i] = sums[i];
}
// 16 x 16, 32 deep, 8 bytes per lane. A, B: of core/fp8.h, in the form of the chip.
template <class A, class B>
__device__ void mfma_fp8(float (&c)[4], const uint32_t (&a)[2], const uint32_t (&b)[2]) {
    using Sums = Native<float, 4>;
    const long rows = __builtin_bit_cast(long, a), columns = __builtin_bit_cast(long, b);
    Sums sums;
    for (int i = 0; i < 4; i++) sums[i] = c[i];
    if constexpr (A::mantissa == 3 && B::mantissa == 3)
        sums = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(rows, columns, sums, 0, 0, 0);
    else if constexpr (A::mantissa == 3)
        sums = __builtin_amdgcn_mfma_f32_16x16x32_fp8_bf8(rows, columns, sums, 0, 0, 0);
    else if constexpr (B::mantissa == 3)
        sums = __builtin_amdgcn_mfma_f32_16x16x32_bf8_fp8(rows, columns, sums, 0, 0, 0);
    else
        sums = __builtin_amdgcn_mfma_f32_16x16x32_bf8_bf8(rows, columns, sums, 0, 0, 0);
    for (int i = 0; i < 4; i++) c[i] = sums[i];
}
#endif
// Whether the matrix units multiply F of core/fp8.h.
#if defined(__gfx942__)
template <class F>
constexpr bool multiplies_fp8 = F::is_fnuz;
#elif defined(__gfx950__)
template <class F>
constexpr bool multiplies_fp8 = !F::is_fnuz;
#else
template <class F>
constexpr bool multiplies_fp8 = false;
#endif

// The lower halves of two words, the upper ones: one instruction.
inline __device__ uint32_t lower_halves(uint32_t low, uint32_t high) {
    return __builtin_amdgcn_perm(high, low, 0x05040100u);
}
inline __device__ uint32_t upper_halves(uint32_t low, uint32_t high) {
    return __builtin_amdgcn_perm(high, low, 0x07060302u);
}
// n words of global memory at a lane's offset from a uniform address, which stays in scalar registers: no vector additions.
template <int n>
__device__ void load_words(uint32_t (&out)[n], const char* uniform, uint32_t offset) {
    using Global = const __attribute__((address_space(1))) char*;
    Global base = (Global)uniform;
    asm volatile("" : "+s"(base));
    const auto bits =
        *reinterpret_cast<const __attribute__((address_space(1))) Native<uint32_t, n>*>(base + offset);
    for (int i = 0; i < n; i++) out[i] = bits[i];
}
// Waits for this wave's loads from memory.
inline __device__ void wait_for_loads() {
    __builtin_amdgcn_s_waitcnt(0x0f70);  // vmcnt(0) alone
}
// Words of memory that several blocks access at a time, each in one piece, without an order. wait_for_memory(): this wave's
// accesses before it are over; a barrier and a store_word() after it tell other blocks so, of these words alone.
//
// Blocks may be on XCDs, each with an L2 cache of its own. All of these are monotonic atomics of agent scope, which are coherent
// there: loads and stores have sc1; additions bypass L1 and have no bit, for theirs would mean system scope. vmcnt is 0 once they
// have completed. What a release and an acquire add to that, buffer_wbl2 sc1 and buffer_inv sc1, writes back what narrower
// accesses left in L2, and drops what they would find there: memory that only these functions access until the kernel's end
// needs neither, and a write-back per step would cost more than the step. LLVM, User Guide for AMDGPU Backend, Memory Model
// GFX942. Formally, only a release orders accesses to different words: the order here is that in which a wave issues them.
template <class W>
__device__ W load_word(const W* p) {
    return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class W>
__device__ void store_word(W* p, W x) {
    __hip_atomic_store(p, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
inline __device__ void add_word(float* p, float x) {
    unsafeAtomicAdd(p, x);
}
inline __device__ void wait_for_memory() {
    asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
}
// Of this wave among those of its SIMD, 0 to 3: around MFMAs, so that a wave that has its operands goes first.
template <int priority>
__device__ void set_priority() {
    __builtin_amdgcn_s_setprio(priority);
}
#endif

}  // namespace llamac
