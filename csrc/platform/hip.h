// HIP's names on every platform; every kernel and every caller of the runtime includes this file. AMD: HIP itself.
// NVIDIA: a name map (hip_on_nvidia.h). CPU: an emulated device (emulation/). docs/rocm.md describes how to write
// a kernel that runs on all three. Each platform also defines for kernels:
//
//   warp_size                lanes of a warp; the host calls device_properties()
//   registers_in_full_block  32-bit registers of a thread in a block of 1,024
//   fast_exp2(x)             2^x in one instruction, to 2 ulp; results below the smallest normal number are 0
//   fast_sqrt, fast_reciprocal   one instruction, to 1 ulp; on NVIDIA, subnormal numbers are 0
//   any_lane(holds)          true if the predicate holds in any lane of the warp
//   optimization_barrier(x)  x; the compiler computes dependent addresses again instead of keeping them in registers.
//                            optimization_barrier_uniform: x is the same in all lanes
//   warp_uniform(x)          x, the same in all lanes of a warp; on AMD in a scalar register, and branches on it are scalar
//   scheduling_barrier()     the compiler moves no load across it, which would hold registers for longer
//   sync_shared()            __syncthreads() for LDS alone: of other memory, nothing is promised
//   sync_row()               __syncthreads() for the threads with one threadIdx.y, whole warps; at most 15 rows if a row has
//                            several warps. Elsewhere than on NVIDIA for the block: all rows call it equally often
//   issue_loads()            loads before it are in flight when later ones begin; all lanes of a warp call it
//   copy_asynchronously(shared, global, valid)   16 bytes from memory to LDS, zeros where not `valid`. On NVIDIA, commit_copies()
//                            closes a group of the thread's copies, and wait_for_copies<pending>() waits for all its groups but
//                            the last `pending`. Elsewhere the copy is done at once
//   copies_asynchronously    true on NVIDIA, and in the emulation of 32 lanes, which takes NVIDIA's path
//   load_streaming, store_streaming   128-bit accesses that ask the caches not to keep the line
//   bf16_pair(low, high)     two floats rounded to bf16 (nearest even, NaN stays NaN), low half first
//   fp8_word<F>(x)           four floats as fp8 (core/fp8.h), the first in the lowest byte, if converts_fp8<F>
#pragma once
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "platform/error.h"

namespace llamac {
// The forms of fp8 (core/fp8.h) that matrix units multiply, as bits.
enum class Fp8Units : uint8_t { none = 0, ocp = 1, fnuz = 2, both = 3 };
constexpr bool multiplies(Fp8Units units, bool fnuz) {
    return static_cast<uint8_t>(units) & static_cast<uint8_t>(fnuz ? Fp8Units::fnuz : Fp8Units::ocp);
}
}  // namespace llamac

#if defined(LLAMAC_AMD)
#include <hip/hip_runtime.h>
#if !defined(__HIP__)
#undef __noinline__  // HIP 6 makes it a macro for host compilers; g++ 16's headers have [[gnu::__noinline__]]
#endif

#include "platform/hip_on_amd.h"
#elif defined(LLAMAC_NVIDIA)
#include "platform/hip_on_nvidia.h"
#else
#include "platform/emulation/emulation.h"
#endif

#include "platform/fp16.h"

#if !defined(LLAMAC_CPU) || defined(LLAMAC_EMULATE_FP16)
#define LLAMAC_FP16_KERNELS  // of memory-bound operations
#endif

namespace llamac {

#if defined(__HIPCC__) || defined(__CUDACC__) || defined(LLAMAC_CPU)
// Two floats rounded to E, bf16 or fp16 of core/dtype.h, and back; low half first.
template <class E>
__device__ inline uint32_t pair_bits(float low, float high) {
    if constexpr (E::mantissa == 7)
        return bf16_pair(low, high);
    else
        return fp16_pair(low, high);
}
template <class E>
__device__ inline void pair_values(uint32_t pair, float& low, float& high) {
    if constexpr (E::mantissa == 7) {
        low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
    } else {
        low = fp16_value(static_cast<uint16_t>(pair)), high = fp16_value(static_cast<uint16_t>(pair >> 16));
    }
}
#endif

#if defined(LLAMAC_NVIDIA) || (defined(LLAMAC_CPU) && LLAMAC_WARP == 32)
constexpr bool copies_asynchronously = true;
#else
constexpr bool copies_asynchronously = false;
#endif
#if defined(__HIPCC__) || defined(LLAMAC_CPU)
inline __device__ void copy_asynchronously(char* shared, const void* global, bool valid) {
    *reinterpret_cast<uint4*>(shared) = valid ? *static_cast<const uint4*>(global) : make_uint4(0, 0, 0, 0);
}
inline __device__ void commit_copies() {}
template <int>
__device__ void wait_for_copies() {}
#endif

#if defined(__HIPCC__) || defined(__CUDACC__)  // the emulation has its own
// The block's fast memory (LDS, shared memory) as one object S of the kernel's own; not initialized.
template <class S>
__device__ S& shared_memory() {
    __shared__ S storage;
    return storage;
}
// The part whose size the launch gives, 16-byte aligned.
inline __device__ char* dynamic_shared_memory() {
    extern __shared__ __align__(16) char dynamic_storage[];
    return dynamic_storage;
}
#endif

// Properties of the current device by which a launcher sizes its grid.
struct DeviceProperties {
    const char* name;
    int warp_size, multiprocessors;
    int64_t shared_bytes;  // the most that one block may have
    int64_t cache_bytes;   // the last cache before memory
    int64_t memory_bytes;
    bool emulated;
    bool warpgroups;  // Hopper's own instructions (warpgroup.h)
    bool cdna3;       // MI300X, or the emulated device that stands for it
    Fp8Units fp8;
    int64_t grid_threads;  // a grid has fewer in its first dimension: blocks times threads per block
};
// Asked once. Throws Error, in one line, where there is no device.
const DeviceProperties& device_properties();
// The device that calls of the runtime mean, by its number.
int current_device();
// How many there are, and the one that this thread's later calls mean.
int device_count();
void use_device(int device);

[[noreturn]] void device_failed(hipError_t error, const char* expression, const char* file, int line);
// CHECK(hipX(...)) prints the platform's error text.
inline void check(hipError_t error, const char* expression, const char* file, int line) {
    if (error != hipSuccess) device_failed(error, expression, file, line);
}

// Blocks of `per_block` that hold `count`.
inline unsigned blocks_for(int64_t count, int64_t per_block) {
    const int64_t blocks = (count + per_block - 1) / per_block;
    CHECK(blocks >= 0 && blocks < (int64_t{1} << 31));
    return static_cast<unsigned>(blocks < 1 ? 1 : blocks);
}

// A launch: blocks, threads per block, stream, bytes of dynamic_shared_memory(). Its place in the source is remembered
// for error messages.
struct Grid {
    dim3 blocks, threads;
    size_t shared_bytes;
    hipStream_t stream;
    const char* file;
    int line;

    Grid(dim3 blocks_, dim3 threads_, hipStream_t stream_, size_t shared_bytes_ = 0,
         const char* file_ = __builtin_FILE(), int line_ = __builtin_LINE())
        : blocks(blocks_),
          threads(threads_),
          shared_bytes(shared_bytes_),
          stream(stream_),
          file(file_),
          line(line_) {}
};

// The result of wait() for a structured binding: values by position.
template <size_t position, class P>
struct ReadyOperand {
    P value;
};
template <size_t position, class P>
__host__ __device__ const P& get(const ReadyOperand<position, P>& operand) {
    return operand.value;
}
template <class Positions, class... P>
struct ReadyOperandList;
template <size_t... position, class... P>
struct ReadyOperandList<std::index_sequence<position...>, P...> : ReadyOperand<position, P>... {};
template <class... P>
struct ReadyOperands : ReadyOperandList<std::index_sequence_for<P...>, P...> {};

// An operand of a kernel for programmatic dependent launch: the kernel may start while the previous one in the stream still
// runs. All of its operands except numbers are wrapped (launch() checks it), and only wait() unwraps them. Faster for kernels
// of about ten microseconds on Hopper; no effect elsewhere.
template <class P>
class Dependent {
  public:
    explicit Dependent(P operand_) : operand(operand_) {}

  private:
    P operand;
    template <class... Q>
    friend __device__ ReadyOperands<Q...> wait(const Dependent<Q>&... operands);
};
// Returns the operands when the kernel before this one has ended and its memory is visible.
//     const auto [out, x] = wait(out_, x_);
// Every thread calls it first, including idle ones: the next kernel waits for this one only.
template <class... P>
__device__ ReadyOperands<P...> wait(const Dependent<P>&... operands) {
    grid_dependency_wait();
    return {{{operands.operand}...}};
}
// wait() that first lets the kernel after this one start, which then waits for the end of this one: for kernels too short
// to fill the device.
template <class... P>
__device__ ReadyOperands<P...> start_next_and_wait(const Dependent<P>&... operands) {
    grid_dependents_start();
    return wait(operands...);
}
template <class P>
constexpr bool is_dependent = false;
template <class P>
constexpr bool is_dependent<Dependent<P>> = true;

#if defined(LLAMAC_CPU)
template <class... P>
void start(const Grid& grid, void (*kernel)(P...), P... arguments) {
    emulation::launch<P...>(grid.blocks, grid.threads, grid.shared_bytes, {grid.file, grid.line}, kernel,
                            arguments...);
}
template <class... P>
int resident_blocks(void (*)(P...), int, size_t) {
    return 1;
}
#else
inline void grant_shared_memory(const void* kernel, size_t bytes, const char* file, int line) {
    constexpr size_t granted = 32 * 1024;  // a kernel's own LDS included, more must be requested
    if (bytes > granted)
        check(
            hipFuncSetAttribute(kernel, hipFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
            "dynamic shared memory of a kernel", file, line);
}
template <class... P>
void start(const Grid& grid, void (*kernel)(P...), P... arguments) {
    const void* function = reinterpret_cast<const void*>(kernel);
    grant_shared_memory(function, grid.shared_bytes, grid.file, grid.line);
    void* pointers[] = {&arguments..., nullptr};
    const bool dependent = (is_dependent<P> || ...) && device_properties().warpgroups;
    check(launch_kernel(function, grid.blocks, grid.threads, pointers, grid.shared_bytes, grid.stream,
                        dependent),
          "launch", grid.file, grid.line);
}
// Resident blocks of a kernel per multiprocessor.
template <class... P>
int resident_blocks(void (*kernel)(P...), int threads, size_t shared_bytes) {
    grant_shared_memory(reinterpret_cast<const void*>(kernel), shared_bytes, __FILE__, __LINE__);
    int blocks = 0;
    check(hipOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes), "occupancy",
          __FILE__, __LINE__);
    return blocks > 0 ? blocks : 1;
}
#endif

[[noreturn]] void grid_too_large(const Grid& grid);
template <class... P, class... A>
void launch(const Grid& grid, void (*kernel)(P...), A... arguments) {
    if (int64_t{grid.blocks.x} * grid.threads.x >= device_properties().grid_threads) grid_too_large(grid);
    static_assert(!(is_dependent<P> || ...) || ((is_dependent<P> || std::is_arithmetic_v<P>) && ...),
                  "a kernel with a Dependent operand has no others but numbers");
    start<P...>(grid, kernel, static_cast<P>(arguments)...);
}

}  // namespace llamac

template <class... P>
struct std::tuple_size<llamac::ReadyOperands<P...>> : std::integral_constant<size_t, sizeof...(P)> {};
template <size_t position, class... P>
struct std::tuple_element<position, llamac::ReadyOperands<P...>>
    : std::tuple_element<position, std::tuple<P...>> {};
