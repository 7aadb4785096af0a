// The names of HIP and of hip.h for CUDA.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

using hipError_t = cudaError_t;
using hipStream_t = cudaStream_t;
using hipEvent_t = cudaEvent_t;
using hipDeviceProp_t = cudaDeviceProp;
using hipGraph_t = cudaGraph_t;
using hipGraphExec_t = cudaGraphExec_t;

#define hipSuccess cudaSuccess
#define hipGetErrorString cudaGetErrorString
#define hipGetLastError cudaGetLastError
#define hipGetDevice cudaGetDevice
#define hipGetDeviceCount cudaGetDeviceCount
#define hipSetDevice cudaSetDevice
#define hipGetDeviceProperties cudaGetDeviceProperties
#define hipDeviceGetPCIBusId cudaDeviceGetPCIBusId
#define hipDeviceSynchronize cudaDeviceSynchronize
#define hipMalloc cudaMalloc
#define hipFree cudaFree
#define hipHostFree cudaFreeHost
#define hipHostRegister cudaHostRegister
#define hipHostRegisterDefault cudaHostRegisterDefault
#define hipHostUnregister cudaHostUnregister
#define hipMemGetInfo cudaMemGetInfo
#define hipMemcpy cudaMemcpy
#define hipMemcpyAsync cudaMemcpyAsync
#define hipMemcpy2DAsync cudaMemcpy2DAsync
#define hipMemset cudaMemset
#define hipMemsetAsync cudaMemsetAsync
#define hipMemcpyDefault cudaMemcpyDefault
#define hipStreamCreate cudaStreamCreate
#define hipStreamDestroy cudaStreamDestroy
#define hipStreamSynchronize cudaStreamSynchronize
#define hipStreamWaitEvent cudaStreamWaitEvent
#define hipStreamBeginCapture cudaStreamBeginCapture
#define hipStreamCaptureModeThreadLocal cudaStreamCaptureModeThreadLocal
#define hipStreamEndCapture cudaStreamEndCapture
#define hipStreamIsCapturing cudaStreamIsCapturing
#define hipStreamCaptureStatus cudaStreamCaptureStatus
#define hipStreamCaptureStatusNone cudaStreamCaptureStatusNone
#define hipGraphDestroy cudaGraphDestroy
#define hipGraphExecDestroy cudaGraphExecDestroy
#define hipGraphLaunch cudaGraphLaunch
#define hipEventCreate cudaEventCreate
#define hipEventDestroy cudaEventDestroy
#define hipEventRecord cudaEventRecord
#define hipEventSynchronize cudaEventSynchronize
#define hipEventElapsedTime cudaEventElapsedTime
#define hipOccupancyMaxActiveBlocksPerMultiprocessor cudaOccupancyMaxActiveBlocksPerMultiprocessor
#define hipFuncSetAttribute cudaFuncSetAttribute
#define hipFuncAttributeMaxDynamicSharedMemorySize cudaFuncAttributeMaxDynamicSharedMemorySize

namespace llamac {

constexpr int warp_size = 32;

constexpr int registers_in_full_block = 64;

// Fewer than 2^31 blocks of up to 1,024 threads.
constexpr int64_t grid_threads = int64_t{1} << 41;

// The limit of a block that requests it, as launch() does.
inline size_t largest_shared_memory(const hipDeviceProp_t& properties) {
    return properties.sharedMemPerBlockOptin;
}

inline int64_t last_cache_bytes(const hipDeviceProp_t& properties) {
    return properties.l2CacheSize;
}

// Whether the device has the instructions of warpgroup.h, and this build has code for them.
inline bool has_warpgroups([[maybe_unused]] const hipDeviceProp_t& properties) {
#if defined(LLAMAC_WARPGROUPS)
    return properties.major == 9 && properties.minor == 0;
#else
    return false;
#endif
}

inline bool is_cdna3(const hipDeviceProp_t&) {
    return false;
}

// Since compute capability 8.9.
inline Fp8Units fp8_units(const hipDeviceProp_t& properties) {
    return properties.major * 10 + properties.minor >= 89 ? Fp8Units::ocp : Fp8Units::none;
}

// Signatures differ.
inline hipError_t hipHostMalloc(void** memory, size_t bytes) {
    return cudaMallocHost(memory, bytes);
}
inline hipError_t instantiate_graph(hipGraphExec_t* instance, hipGraph_t graph) {
    return cudaGraphInstantiate(instance, graph, 0);
}

// dependent: programmatic dependent launch, for a kernel that calls grid_dependency_wait().
inline hipError_t launch_kernel(const void* kernel, dim3 blocks, dim3 threads, void** arguments,
                                size_t shared_bytes, hipStream_t stream, bool dependent) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks, config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute, config.numAttrs = dependent;
    return cudaLaunchKernelExC(&config, kernel, arguments);
}

inline __device__ void grid_dependency_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets a kernel that is launched as `dependent` start as soon as all blocks of this one have called it.
inline __device__ void grid_dependents_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#if defined(__CUDACC__)
// LDS as its own instructions address it.
using SharedAddress = uint32_t;
inline __device__ SharedAddress shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// Past the registers and the first cache.
inline __device__ void copy_asynchronously(char* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
inline __device__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int pending>
__device__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

inline __device__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

inline __device__ float fast_sqrt(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
inline __device__ float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

inline __device__ bool any_lane(bool so) {
    return __any_sync(0xffffffffu, so);
}

inline __device__ int optimization_barrier(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// A plain 128-bit store is often split into four of 32 bits.
template <class V>
__device__ void store_vector(V* p, V v) {
    __stwb(p, v);
}

inline __device__ int optimization_barrier_uniform(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

inline __device__ void sync_shared() {
    __syncthreads();
}
// Barrier `id` (1 to 15) of `threads` threads: one side waits, the other only arrives.
inline __device__ void named_barrier_wait(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
inline __device__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
inline __device__ void sync_row() {
    if (blockDim.x == warp_size) return __syncwarp();
    named_barrier_wait(static_cast<int>(threadIdx.y) + 1, static_cast<int>(blockDim.x));
}

inline __device__ int warp_uniform(int x) {
    return x;
}

inline __device__ void scheduling_barrier() {
    asm volatile("" ::: "memory");
}

// Otherwise the assembler alternates loads and uses.
inline __device__ void issue_loads() {
    __syncwarp();
}

inline __device__ uint4 load_streaming(const uint4* p) {
    return __ldcs(p);
}
inline __device__ void store_streaming(uint4* p, uint4 v) {
    __stcs(p, v);
}

inline __device__ uint32_t bf16_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

template <class F>
constexpr bool converts_fp8 = !F::is_fnuz;
template <class F>
__device__ uint32_t fp8_word(const float* x) {
    constexpr __nv_fp8_interpretation_t kind = F::mantissa == 3 ? __NV_E4M3 : __NV_E5M2;
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(x[0], x[1]), __NV_SATFINITE, kind);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(x[2], x[3]), __NV_SATFINITE, kind);
    return low | high << 16;
}
#endif

}  // namespace llamac

#if defined(__CUDACC__)
template <class T>
__device__ T __shfl_xor(T value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <class T>
__device__ T __shfl_up(T value, unsigned distance) {
    return __shfl_up_sync(0xffffffffu, value, distance);
}
template <class T>
__device__ T __shfl(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}
#endif
