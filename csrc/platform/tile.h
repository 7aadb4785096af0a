// The matrix cores: one interface to MFMA, WMMA and mma.sync, independent of the layout of a lane's data. Device
// code; include it only in .hip files.
//
// A Tile is a warp's 16 x 16 tile of a product. Operands are E, bf16 or fp16, sums fp32:
//
//   Tile::Operand          16 rows x 16 of the dimension that is summed over, k
//   Tile::RightOperand     the same as the b of products only: fewer moves of registers where it is a type of
//                          its own
//   Tile::Accumulator      16 rows x 16 columns; x[i], i < elements, are this lane's: row(slot(i)), column(i). slots:
//                          rows a lane
//   multiply<E>(c, a, b)   c[m][n] += sum_k a[m][k] * b[n][k]
//   multiply_fp8<A, B>(c, a, b)  the same of 32 fp8 in the place of 16 E, b a RightOperand; A and B are types of
//                          core/fp8.h with multiplies_fp8<A> && multiplies_fp8<B>
//
// Both operands of a product have the same type: rows are m of the first and n of the second. An accumulator becomes
// an operand without data leaving its lane (columns become k): softmax(q k') is an operand of the product with v.
//
// Operands come from LDS, from a SharedTile: rows of E whose 16-byte chunks are permuted so that no two of the
// eight accesses of a phase use the same bank.
//   load_rows          rows of the SharedTile are the operand's rows, k runs along them
//   load_columns       the transposed: columns of the SharedTile are rows of the operands, all of a SharedTile's
//                      at once, k runs down its rows
// The layout determines the order of k over the lanes. It is the same for two operands that were both loaded by
// load_rows or load_columns<Order::any>; Order::natural is the order of operands made of accumulators. A product with
// load_columns has its columns (or rows) interleaved over the tiles as interleaved() describes, not tile by tile.
//
// TileCopy moves a block's next SharedTile from memory while the warps compute.
#pragma once
#include "platform/hip.h"

namespace llamac {

// XCDs that a grid's blocks are distributed to in turn, each with a cache of its own: those of MI300X and MI355X, and of
// the emulated device that stands for them.
#if defined(__gfx942__) || defined(__gfx950__) || (defined(LLAMAC_CPU) && LLAMAC_WARP == 64)
constexpr int xcds = 8;
#else
constexpr int xcds = 1;
#endif

// A kernel for which that many waves a SIMD must find registers.
#if defined(LLAMAC_AMD)
#define LLAMAC_WAVES_A_SIMD(waves) __attribute__((amdgpu_waves_per_eu(waves)))
#else
#define LLAMAC_WAVES_A_SIMD(waves)
#endif

enum class Order { any, natural };

constexpr int tile_rows = 16;

// `columns` of 16 bits a row; data is 16-byte aligned.
template <int columns>
struct SharedTile {
    static_assert(columns == 32 || columns % 64 == 0);
    static constexpr int chunks = columns / 8;
    char* data;

    static constexpr int64_t bytes(int rows) { return int64_t{rows} * columns * 2; }
    // Rows that lie in the same banks differ in what their chunks are xor-ed with. Rows four apart differ by 2:
    // MI300X reads 16 bytes a lane for lanes 0 to 3 and 20 to 23 at once, which have neighboring chunks of eight
    // rows in load_rows, chunks 0 to 3 and 4 to 7 of rows four apart in load_columns.
    static constexpr __device__ int swizzle(int row) {
        return chunks == 4 ? row / 2 % 4 : row % 2 + row / 2 % 2 * 4 + row / 4 % 2 * 2;
    }
    static constexpr __device__ int offset(int row, int chunk) {
        return (row * chunks + (chunk ^ swizzle(row))) * 16;
    }
    // 16 bytes, `chunk` of `row`.
    __device__ char* at(int row, int chunk) const { return data + offset(row, chunk); }
    // The same for an offset() that a lane keeps, `rows` further down, its chunk xor-ed with `flip`: one
    // register in a loop, not one for each place that it reads.
    __device__ char* at(int kept, int rows, int flip) const {
        return data + ((optimization_barrier(kept) ^ flip * 16) + rows * chunks * 16);
    }
};

}  // namespace llamac

#if defined(LLAMAC_NVIDIA)
#include "platform/matrix_on_nvidia.h"
#elif defined(LLAMAC_AMD)
#include "platform/matrix_on_amd.h"
#else
#include "platform/emulation/matrix.h"
#endif

namespace llamac {

// Sizes of a launch. operands_in_registers: there are enough to keep operands that stay the same
// through a loop; elsewhere they are loaded from LDS again and again.
struct Mfma {
    static constexpr int warp = 64;
    static constexpr bool operands_in_registers = true;
};
struct Wmma {
    static constexpr int warp = 32;
    static constexpr bool operands_in_registers = false;
};
struct MmaSync {
    static constexpr int warp = 32;
    static constexpr bool operands_in_registers = false;
};

}  // namespace llamac

#if defined(LLAMAC_NVIDIA) || (defined(LLAMAC_CPU) && LLAMAC_WARP == 32)
#include "platform/tile_mma_sync.h"
#elif defined(__GFX11__)
#include "platform/tile_wmma.h"
#else
#include "platform/tile_mfma.h"
#endif
#include "platform/tile_copy.h"

namespace llamac {

// f(Machine of the device that is there): a kernel's own is Machine, but a host's program for AMD serves two.
template <class F>
void on_machine(F f) {
#if defined(LLAMAC_AMD)
    if (device_properties().warp_size == Wmma::warp) return f(Wmma{});
#endif
    f(Machine{});
}

}  // namespace llamac
