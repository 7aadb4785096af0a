// An emulated device for tests on the CPU: the kernels' own text, one block at a time on each host thread,
// one fiber a GPU thread. __syncthreads is a rendezvous of the block's fibers, every warp operation one of a
// warp's. LLAMAC_WARP, 32 or 64, is the warp size.
//
// It detects faults that a GPU may hide:
// - Memory and LDS are full of NaN until they are written.
// - The program ends, with file and line, at a __syncthreads or a warp operation that not all threads reach
//   (lanes that have returned are excused from warp operations, not from barriers), at a shuffle from a lane
//   that has returned or does not exist, at more LDS than a block may have, at an impossible grid.
// - Lanes, warps and blocks run forward or reversed, lanes and warps in random orders too.
// - AddressSanitizer sees one element too far in memory and in LDS, UBSan a misaligned 128-bit access.
// - ThreadSanitizer, to which fibers are threads, sees what two threads of a grid access, at least one of
//   them writing, with no barrier between: a missing __syncthreads, a shuffle taken for one, two blocks that
//   write the same element.
// tests/ops/emulation_faults.cpp has a kernel for each.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct __attribute__((aligned(16), may_alias)) uint4 {  // kernels read other types' memory through it
    uint32_t x, y, z, w;
};
struct __attribute__((aligned(8), may_alias)) uint2 {
    uint32_t x, y;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) {
    return {x, y};
}
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    return {x, y, z, w};
}

// Not inline: operations of each instruction set (platform/cpu_level.h) see the emulation's. constinit: without a wrapper.
extern constinit thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace llamac {

constexpr int warp_size = LLAMAC_WARP;
// Those of MI300X for 64 lanes, of NVIDIA's devices for 32.
constexpr int registers_in_full_block = 2 * LLAMAC_WARP;

namespace emulation {

enum class Order { forward, reversed, shuffled };
// In which order lanes and warps run. No correct kernel can tell.
void set_order(Order order);

struct Event;  // of hipEvent_t

struct Site {
    const char* file;
    int line;
};
// A warp operation: run once for all lanes that wait at it. lanes[i] is lane i's argument, null where the
// lane has returned or does not exist. ThreadSanitizer does not see its accesses: lanes read and write LDS
// before and after it, by themselves.
using Collective = void (*)(void* const* lanes, Site site);
void collective(Collective operation, void* argument, Site site);
void barrier(Site site);
int lane();
[[noreturn]] void die(Site site, const char* what, Site other = {});
// The block's memory for one type of object: the same address for all threads of a block.
void* shared_object(const void* type, size_t bytes);
char* dynamic_shared_memory();
void run_grid(dim3 blocks, dim3 threads, size_t shared_bytes, Site site, void (*body)(void*), void* argument);

template <class... P>
void launch(dim3 blocks, dim3 threads, size_t shared_bytes, Site site, void (*kernel)(P...), P... arguments) {
    auto call = [&] { kernel(arguments...); };
    const auto body = [](void* bound) { (*static_cast<decltype(call)*>(bound))(); };
    run_grid(blocks, threads, shared_bytes, site, body, &call);
}

template <class T>
T shuffle(T value, int source, Site site) {
    static_assert(std::is_trivially_copyable_v<T>);
    struct Lane {
        T value, result;
        int source;
    } own{value, value, source};
    const auto exchange = [](void* const* lanes, Site at) {
        for (int l = 0; l < warp_size; l++) {
            if (!lanes[l]) continue;
            Lane& to = *static_cast<Lane*>(lanes[l]);
            if (!lanes[to.source]) die(at, "a shuffle reads a lane that has returned or does not exist");
            to.result = static_cast<Lane*>(lanes[to.source])->value;
        }
    };
    collective(exchange, &own, site);
    return own.result;
}

}  // namespace emulation

template <class S>
S& shared_memory() {
    static_assert(std::is_trivial_v<S> && alignof(S) <= alignof(std::max_align_t));
    static const char type = 0;  // one a type: its address tells them apart
    return *static_cast<S*>(emulation::shared_object(&type, sizeof(S)));
}
inline char* dynamic_shared_memory() {
    return emulation::dynamic_shared_memory();
}

inline bool any_lane(bool so, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    const auto vote = [](void* const* lanes, emulation::Site) {
        bool any = false;
        for (int l = 0; l < warp_size; l++) any |= lanes[l] && *static_cast<bool*>(lanes[l]);
        for (int l = 0; l < warp_size; l++)
            if (lanes[l]) *static_cast<bool*>(lanes[l]) = any;
    };
    emulation::collective(vote, &so, {file, line});
    return so;
}

inline void grid_dependency_wait() {}
inline void grid_dependents_start() {}

inline int optimization_barrier(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
template <class V>
void store_vector(V* p, V v) {
    *p = v;
}
inline float fast_exp2(float x) {
    return std::exp2(x);
}
inline float fast_sqrt(float x) {
    return std::sqrt(x);
}
inline float fast_reciprocal(float x) {
    return 1.0f / x;
}
inline int optimization_barrier_uniform(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
#define sync_shared __syncthreads
#define sync_row __syncthreads
inline int warp_uniform(int x) {
    return x;
}
inline void scheduling_barrier() {}
inline void issue_loads() {}
inline uint4 load_streaming(const uint4* p) {
    return *p;
}
inline void store_streaming(uint4* p, uint4 v) {
    *p = v;
}
inline uint32_t bf16_bits(float value) {
    uint32_t u;
    std::memcpy(&u, &value, 4);
    return value != value ? (u >> 16 | 0x40u) : (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
}
inline uint32_t bf16_pair(float low, float high) {
    return bf16_bits(low) | bf16_bits(high) << 16;
}
// There is no instruction.
template <class F>
constexpr bool converts_fp8 = false;

}  // namespace llamac

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    llamac::emulation::barrier({file, line});
}
template <class T>
T __shfl_xor(T value, int mask, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return llamac::emulation::shuffle(value, llamac::emulation::lane() ^ mask, {file, line});
}
// A lane whose source would lie outside the warp keeps its own value.
template <class T>
T __shfl_up(T value, unsigned distance, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    const int lane = llamac::emulation::lane(), source = lane - static_cast<int>(distance);
    return llamac::emulation::shuffle(value, source < 0 ? lane : source, {file, line});
}
template <class T>
T __shfl(T value, int source, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return llamac::emulation::shuffle(value, source % llamac::warp_size, {file, line});
}
inline int atomicAdd(int* p, int value) {
    return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
}
inline unsigned atomicMax(unsigned* p, unsigned value) {
    unsigned seen = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (seen < value &&
           !__atomic_compare_exchange_n(p, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return seen;
}
inline float __expf(float x) {
    return std::exp(x);
}
inline void sincospif(float x, float* sine, float* cosine) {
    *sine = static_cast<float>(std::sin(M_PI * x)), *cosine = static_cast<float>(std::cos(M_PI * x));
}
// Four bytes of the eight of low and high, named from the result's lowest on by selector's digits, 0 to 7.
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = uint64_t{high} << 32 | low;
    uint32_t picked = 0;
    for (int i = 0; i < 4; i++)
        picked |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return picked;
}
inline uint32_t __float_as_uint(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}
inline float __uint_as_float(uint32_t u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

// ---- the runtime, as far as it is used: device memory is the host's, and every call is done when it returns

enum hipError_t { hipSuccess = 0, hipErrorOutOfMemory = 2 };
enum hipMemcpyKind { hipMemcpyDefault = 4 };
using hipStream_t = void*;
using hipEvent_t = llamac::emulation::Event*;

inline const char* hipGetErrorString(hipError_t error) {
    return error == hipSuccess ? "no error" : "out of memory";
}
inline hipError_t hipGetLastError() {
    return hipSuccess;
}
inline hipError_t hipDeviceSynchronize() {
    return hipSuccess;
}
inline hipError_t hipStreamSynchronize(hipStream_t) {
    return hipSuccess;
}
inline hipError_t hipMemset(void* p, int value, size_t bytes) {
    std::memset(p, value, bytes);
    return hipSuccess;
}
inline hipError_t hipMemsetAsync(void* p, int value, size_t bytes, hipStream_t) {
    return hipMemset(p, value, bytes);
}
// Full of NaN, and of impossible indices; the host's threads share out the first touch.
hipError_t hipMalloc(void** p, size_t bytes);
inline hipError_t hipFree(void* p) {
    std::free(p);
    return hipSuccess;
}
inline hipError_t hipHostMalloc(void** p, size_t bytes) {
    return hipMalloc(p, bytes);
}
inline hipError_t hipHostFree(void* p) {
    return hipFree(p);
}
constexpr unsigned hipHostRegisterDefault = 0;
inline hipError_t hipHostRegister(void*, size_t, unsigned) {
    return hipSuccess;
}
inline hipError_t hipHostUnregister(void*) {
    return hipSuccess;
}
// The machine's memory, used or not.
hipError_t hipMemGetInfo(size_t* free, size_t* total);
inline hipError_t hipMemcpy(void* to, const void* from, size_t bytes, hipMemcpyKind) {
    std::memcpy(to, from, bytes);
    return hipSuccess;
}
inline hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind kind, hipStream_t) {
    return hipMemcpy(to, from, bytes, kind);
}
inline hipError_t hipMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                   size_t width, size_t height, hipMemcpyKind, hipStream_t) {
    for (size_t row = 0; row < height; row++)
        std::memcpy(static_cast<char*>(to) + row * to_pitch,
                    static_cast<const char*>(from) + row * from_pitch, width);
    return hipSuccess;
}
hipError_t hipEventCreate(hipEvent_t* event);
hipError_t hipEventDestroy(hipEvent_t event);
hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream);
inline hipError_t hipStreamWaitEvent(hipStream_t, hipEvent_t, unsigned) {
    return hipSuccess;
}
inline hipError_t hipEventSynchronize(hipEvent_t) {
    return hipSuccess;
}
hipError_t hipEventElapsedTime(float* milliseconds, hipEvent_t begin, hipEvent_t end);
