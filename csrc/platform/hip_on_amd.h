// The names of hip.h that HIP lacks.
#pragma once
#include <string>

namespace llamac {

// 64 on CDNA and GCN, 32 on RDNA.
#if defined(__GFX10__) || defined(__GFX11__) || defined(__GFX12__)
constexpr int warp_size = 32;
#else
constexpr int warp_size = 64;
#endif

// CDNA's SIMD has 512 per lane for four of the block's warps. RDNA 3 has more.
constexpr int registers_in_full_block = 128;

// HIP's limit of blocks times threads per block in a dimension of a grid.
constexpr int64_t grid_threads = int64_t{1} << 32;

inline size_t largest_shared_memory(const hipDeviceProp_t& properties) {
    return properties.sharedMemPerBlock;
}

inline bool is_chip(const hipDeviceProp_t& properties, const char* chip) {
    return std::string(properties.gcnArchName).rfind(chip, 0) == 0;
}

// Behind the L2 of MI300X's and MI355X's chiplets lies one cache of 256 MiB.
inline int64_t last_cache_bytes(const hipDeviceProp_t& properties) {
    const bool behind = is_chip(properties, "gfx942") || is_chip(properties, "gfx950");
    return behind ? int64_t{256} << 20 : properties.l2CacheSize;
}

inline bool has_warpgroups(const hipDeviceProp_t&) {
    return false;
}

inline bool is_cdna3(const hipDeviceProp_t& properties) {
    return is_chip(properties, "gfx942");
}

inline Fp8Units fp8_units(const hipDeviceProp_t& properties) {
    return is_chip(properties, "gfx942")   ? Fp8Units::fnuz
           : is_chip(properties, "gfx950") ? Fp8Units::ocp
                                           : Fp8Units::none;
}

// Signatures differ.
inline hipError_t instantiate_graph(hipGraphExec_t* instance, hipGraph_t graph) {
    return hipGraphInstantiate(instance, graph, nullptr, nullptr, 0);
}
inline hipError_t launch_kernel(const void* kernel, dim3 blocks, dim3 threads, void** arguments,
                                size_t shared_bytes, hipStream_t stream, bool /*dependent*/) {
    return hipLaunchKernel(kernel, blocks, threads, arguments, shared_bytes, stream);
}

inline __device__ void grid_dependency_wait() {}
inline __device__ void grid_dependents_start() {}

#if defined(__HIPCC__)
inline __device__ float fast_exp2(float x) {
    return __builtin_amdgcn_exp2f(x);
}

inline __device__ float fast_sqrt(float x) {
    return __builtin_amdgcn_sqrtf(x);
}
inline __device__ float fast_reciprocal(float x) {
    return __builtin_amdgcn_rcpf(x);
}

inline __device__ bool any_lane(bool so) {
    return __any(so);
}

inline __device__ int optimization_barrier(int x) {
    asm volatile("" : "+v"(x));
    return x;
}

inline __device__ int optimization_barrier_uniform(int x) {
    asm volatile("" : "+s"(x));
    return x;
}

inline __device__ int warp_uniform(int x) {
    return __builtin_amdgcn_readfirstlane(x);
}

template <class V>
__device__ void store_vector(V* p, V v) {
    *p = v;
}

inline __device__ void scheduling_barrier() {
    __builtin_amdgcn_sched_barrier(0);
}

// One piece of assembly: of __syncthreads(), the wait can come to stand far ahead of the barrier.
inline __device__ void sync_shared() {
    asm volatile("s_waitcnt lgkmcnt(0)\n\ts_barrier" ::: "memory");
}

inline __device__ void sync_row() {
    __syncthreads();
}

inline __device__ void issue_loads() {
    __builtin_amdgcn_sched_barrier(0);
}

using NativeVector = uint32_t __attribute__((ext_vector_type(4)));
inline __device__ uint4 load_streaming(const uint4* p) {
    const NativeVector v = __builtin_nontemporal_load(reinterpret_cast<const NativeVector*>(p));
    return make_uint4(v.x, v.y, v.z, v.w);
}
inline __device__ void store_streaming(uint4* p, uint4 v) {
    const NativeVector native = {v.x, v.y, v.z, v.w};
    __builtin_nontemporal_store(native, reinterpret_cast<NativeVector*>(p));
}

// In the upper half. Both results are made first, or the compiler branches around each.
inline __device__ uint32_t bf16_upper(float value) {
    const uint32_t u = __float_as_uint(value), rounded = u + 0x7fffu + (u >> 16 & 1u), quiet = u | 0x400000u;
    return value != value ? quiet : rounded;
}
inline __device__ uint32_t bf16_bits(float value) {
    return bf16_upper(value) >> 16;
}
inline __device__ uint32_t bf16_pair(float low, float high) {
    return __builtin_amdgcn_perm(bf16_upper(high), bf16_upper(low), 0x07060302u);
}

// The instruction converts to the form of the matrix units. It does not saturate, and the median turns NaN into a number.
#if defined(__gfx942__)
template <class F>
constexpr bool converts_fp8 = F::is_fnuz;
#elif defined(__gfx950__)
template <class F>
constexpr bool converts_fp8 = !F::is_fnuz;
#else
template <class F>
constexpr bool converts_fp8 = false;
#endif
#if defined(__gfx942__) || defined(__gfx950__)
template <class F>
__device__ uint32_t fp8_word(const float* x) {
    float v[4];
    for (int i = 0; i < 4; i++) {
        const float clamped = __builtin_amdgcn_fmed3f(x[i], F::largest, -F::largest);
        v[i] = x[i] != x[i] ? x[i] : clamped;
    }
    int word = 0;
    if constexpr (F::mantissa == 3) {
        word = __builtin_amdgcn_cvt_pk_fp8_f32(v[0], v[1], word, false);
        word = __builtin_amdgcn_cvt_pk_fp8_f32(v[2], v[3], word, true);
    } else {
        word = __builtin_amdgcn_cvt_pk_bf8_f32(v[0], v[1], word, false);
        word = __builtin_amdgcn_cvt_pk_bf8_f32(v[2], v[3], word, true);
    }
    return static_cast<uint32_t>(word);
}
#endif
#endif

}  // namespace llamac
