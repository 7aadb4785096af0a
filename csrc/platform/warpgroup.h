// Primitives of Hopper (sm_90a) for its own kernels: products of 128 threads that read LDS directly (wgmma), copies
// of whole tiles by one thread (TMA), barriers in LDS for both, and reallocation of registers from warps that copy to
// warps that compute. Their layouts have no counterpart on other machines, so they are not a part of tile.h.
// LLAMAC_WARPGROUPS: this build has code for sm_90a (nvidia.cmake). LLAMAC_WARPGROUP_CODE is defined while the
// compiler processes that code.
#pragma once
#include "platform/hip.h"

#if defined(LLAMAC_WARPGROUPS)
#include <cuda.h>

#include "platform/matrix_on_nvidia.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define LLAMAC_WARPGROUP_CODE
#endif

namespace llamac {

constexpr int warpgroup_size = 128;
// A kernel's TensorMap parameter has an address that the copies take.
#define LLAMAC_KERNEL_CONSTANT __grid_constant__

// ---- host: how a tile lies in memory

// Up to four dimensions, the innermost contiguous, of 16 bits, which TMA moves as they are. A tile is `columns` (64: 128 bytes, the
// swizzle's width) by `rows` of dimension 1. Elements outside of the tensor are read as zero.
using TensorMap = CUtensorMap;
// Throws nothing; ends the program where the driver refuses the shape.
inline TensorMap make_tensor_map(const void* data, const int64_t (&shape)[4], const int64_t (&stride)[4],
                                 int rows) {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static const Encode encode = [] {
        void* f = nullptr;
        cudaDriverEntryPointQueryResult found;
        check(
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found),
            "cuTensorMapEncodeTiled", __FILE__, __LINE__);
        return reinterpret_cast<Encode>(f);
    }();
    cuuint64_t sizes[4], bytes[3];
    for (int d = 0; d < 4; d++) sizes[d] = static_cast<cuuint64_t>(shape[d]);
    // A stride that is never taken must still be one that the hardware takes.
    for (int d = 1; d < 4; d++) bytes[d - 1] = shape[d] == 1 ? 16 : static_cast<cuuint64_t>(stride[d]) * 2;
    const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(rows), 1, 1}, steps[4] = {1, 1, 1, 1};
    TensorMap map;
    const CUresult result =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(data), sizes, bytes, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    check(result == CUDA_SUCCESS ? hipSuccess : cudaErrorInvalidValue, "cuTensorMapEncodeTiled", __FILE__,
          __LINE__);
    return map;
}

// ---- barriers in LDS

// A phase ends when `count` threads have arrived and the bytes that they announced have come.
struct SharedBarrier {
    uint64_t state;

    __device__ void init(int count) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(count)
                     : "memory");
    }
    __device__ void arrive() {
        asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&state)) : "memory");
    }
    // One arrival for a warp, after the work of all its lanes.
    __device__ void arrive_as_warp() {
        __syncwarp();
        if (threadIdx.x % warp_size == 0) arrive();
    }
    __device__ void arrive_expecting(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&state)),
                     "r"(bytes)
                     : "memory");
    }
    // Until the phase of that parity (0 for the first) has ended.
    __device__ void wait(int parity) {
        asm volatile(
            "{ .reg .pred done;\n"
            "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
            "@!done bra again; }" ::"r"(shared_address(&state)),
            "r"(parity)
            : "memory");
    }
};
// After init, before others use the barriers.
inline __device__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Between plain stores to LDS and copies or products that read it.
inline __device__ void fence_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A flag for threads of other blocks: after load_acquire() has read it, they see all writes before store_release().
inline __device__ void store_release(int* p, int x) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
inline __device__ int load_acquire(const int* p) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

// p[i] += x[i] for i < 4, atomically.
inline __device__ void add_to_memory(float* p, const float* x) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
}

// ---- copies: one thread's; `to` is 1024-byte aligned, the barrier counts the tile's bytes

inline __device__ void load_tile(void* to, const TensorMap& map, SharedBarrier& barrier, int column, int row,
                                 int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6}], "
        "[%2];" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier.state)), "r"(column), "r"(row), "r"(head), "r"(batch)
        : "memory");
}

// `bytes` in a row; both ends and the number are multiples of 16.
inline __device__ void load_bytes(void* to, const void* from, int bytes, SharedBarrier& barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(&barrier.state))
        : "memory");
}

// ---- registers

template <int count>
__device__ void warpgroup_acquire_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ void warpgroup_release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// ---- products: c[64][N] += a[64][16] b[16][N], asynchronous

// An operand in LDS in rows of 128 bytes as load_tile lays them. along: bytes from one group of 64 columns to
// the next, where N or M runs along the rows; else unused.
inline __device__ uint64_t shared_operand(const void* p, int along = 16) {
    constexpr uint64_t swizzle_128 = uint64_t{1} << 62, eight_rows = uint64_t{1024 >> 4} << 32;
    return (shared_address(p) & 0x3ffff) >> 4 | uint64_t(along >> 4) << 16 | eight_rows | swizzle_128;
}
// The operand `bytes` further on.
inline __device__ uint64_t advance(uint64_t operand, int bytes) {
    return operand + (bytes >> 4);
}
// Lane l of warp w of the group holds rows 16 w + l / 4 and + 8: element i is column i / 4 * 8 + l % 4 * 2 + i % 2
// of row slot i / 2 % 2. Operands in registers are such elements, in pairs.
// fresh: c is overwritten; then the compiler need not have it in place before. b_transposed: N runs along the
// rows in LDS, not k; a_transposed: M does.

// Such an operand to LDS: four 8x8 matrices, rows from 0 and 8 of the first eight columns, then of the next. Lane l brings
// the address of row l % 8 of matrix l / 8.
inline __device__ void store_matrices(uint32_t address, const uint32_t (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// An asm text names every register: lists of 32 and 64 of them, as text and as operands.
#define LLAMAC_EIGHT(mode, i)                                                                   \
    mode(c[i]), mode(c[i + 1]), mode(c[i + 2]), mode(c[i + 3]), mode(c[i + 4]), mode(c[i + 5]), \
        mode(c[i + 6]), mode(c[i + 7])
#define LLAMAC_SUMS_32(mode) \
    LLAMAC_EIGHT(mode, 0), LLAMAC_EIGHT(mode, 8), LLAMAC_EIGHT(mode, 16), LLAMAC_EIGHT(mode, 24)
#define LLAMAC_SUMS_64(mode)                                                                      \
    LLAMAC_SUMS_32(mode), LLAMAC_EIGHT(mode, 32), LLAMAC_EIGHT(mode, 40), LLAMAC_EIGHT(mode, 48), \
        LLAMAC_EIGHT(mode, 56)
#define LLAMAC_NAMES_32                                                      \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15," \
    " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define LLAMAC_NAMES_64                                                                \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"           \
    " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31," \
    " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47," \
    " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
#define LLAMAC_WRITTEN(x) "=f"(x)
#define LLAMAC_UPDATED(x) "+f"(x)
// For E and fresh. n: half of N. Then the text of the operands behind the sums, and the operands.
#define LLAMAC_PRODUCT(N, n, type, add, mode, text, ...)                                               \
    asm volatile("{.reg .pred add; setp.ne.b32 add, " #add ", 0; wgmma.mma_async.sync.aligned.m64n" #N \
                 "k16.f32." type "." type " " LLAMAC_NAMES_##n text                                    \
                 : LLAMAC_SUMS_##n(mode)                                                               \
                 : __VA_ARGS__)
#define LLAMAC_PRODUCTS(N, n, ...)                                    \
    if constexpr (fresh && E::mantissa == 7)                          \
        LLAMAC_PRODUCT(N, n, "bf16", 0, LLAMAC_WRITTEN, __VA_ARGS__); \
    else if constexpr (fresh)                                         \
        LLAMAC_PRODUCT(N, n, "f16", 0, LLAMAC_WRITTEN, __VA_ARGS__);  \
    else if constexpr (E::mantissa == 7)                              \
        LLAMAC_PRODUCT(N, n, "bf16", 1, LLAMAC_UPDATED, __VA_ARGS__); \
    else                                                              \
        LLAMAC_PRODUCT(N, n, "f16", 1, LLAMAC_UPDATED, __VA_ARGS__)
template <class E, bool fresh, bool b_transposed, bool a_transposed = false>
__device__ void warpgroup_multiply(float (&c)[32], uint64_t a, uint64_t b) {
    LLAMAC_PRODUCTS(64, 32, "%32, %33, add, 1, 1, %35, %34;}", "l"(a), "l"(b), "n"(int(b_transposed)),
                    "n"(int(a_transposed)));
}
template <class E, bool fresh, bool b_transposed>
__device__ void warpgroup_multiply(float (&c)[32], const uint32_t (&a)[4], uint64_t b) {
    LLAMAC_PRODUCTS(64, 32, "{%32, %33, %34, %35}, %36, add, 1, 1, %37;}", "r"(a[0]), "r"(a[1]), "r"(a[2]),
                    "r"(a[3]), "l"(b), "n"(int(b_transposed)));
}
template <class E, bool fresh, bool b_transposed, bool a_transposed = false>
__device__ void warpgroup_multiply(float (&c)[64], uint64_t a, uint64_t b) {
    LLAMAC_PRODUCTS(128, 64, "%64, %65, add, 1, 1, %67, %66;}", "l"(a), "l"(b), "n"(int(b_transposed)),
                    "n"(int(a_transposed)));
}
template <class E, bool fresh, bool b_transposed>
__device__ void warpgroup_multiply(float (&c)[64], const uint32_t (&a)[4], uint64_t b) {
    LLAMAC_PRODUCTS(128, 64, "{%64, %65, %66, %67}, %68, add, 1, 1, %69;}", "r"(a[0]), "r"(a[1]), "r"(a[2]),
                    "r"(a[3]), "l"(b), "n"(int(b_transposed)));
}
#undef LLAMAC_EIGHT
#undef LLAMAC_SUMS_32
#undef LLAMAC_SUMS_64
#undef LLAMAC_NAMES_32
#undef LLAMAC_NAMES_64
#undef LLAMAC_PRODUCT
#undef LLAMAC_PRODUCTS
#undef LLAMAC_WRITTEN
#undef LLAMAC_UPDATED

// Before the first product of a group, and after registers that it reads or adds to were written.
inline __device__ void warpgroup_arrive() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
inline __device__ void warpgroup_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most `pending` committed groups run.
template <int pending>
__device__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Computes x, which is never below 0, before the following code. Without it, ptxas moves a wait for products above arithmetic
// that should run beside them. It moves nothing over a barrier.
inline __device__ void compute_before(float x) {
    asm volatile("{ .reg .pred never; setp.lt.f32 never, %0, 0f00000000; @never bar.arrive 15, 64; }" ::"f"(x)
                 : "memory");
}
// The compiler does not see that a product still writes these registers: it may not touch them before this. Sums
// that begin as zeros go through it too, or it makes the zeros where products already run, and waits for them.
template <int n>
__device__ void operand_fence(float (&c)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++) asm volatile("" : "+f"(c[i])::"memory");
}
}  // namespace llamac
#endif
