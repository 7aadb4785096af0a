// Shared by the kernels `mfma` of attention, for CDNA3: tiles on their way from memory to LDS, and the order in which a wave
// issues matrix instructions and reads of LDS.
#pragma once
#include "core/device.h"
#include "ops/attention/attention.h"
#include "ops/attention/flash.h"
#include "platform/tile.h"

#if defined(LLAMAC_MFMA) && !defined(__GFX11__)
namespace llamac {

// A matrix of 16 bits, `rows` x HD, on its way to LDS by a block of `threads`. Rows that do not exist are copies of the last:
// scores of such keys are hidden. Bytes of `rows` rows are below 2^31.
template <int rows, int HD, int threads>
struct RowsCopy {
    static constexpr int chunks = HD / 8, pass = threads / chunks, each = rows / pass;
    static_assert(rows % pass == 0 && pass % 8 == 0);
    uint32_t staged[each][4];

    // first: the uniform address of row 0; pitch: bytes from row to row.
    __device__ void begin(const char* first, int pitch, int valid) {
        const int row = static_cast<int>(threadIdx.x) / chunks,
                  at = static_cast<int>(threadIdx.x) % chunks * 16;
        if (valid >= rows) {
            const uint32_t mine = optimization_barrier(row * pitch + at);
#pragma unroll
            for (int i = 0; i < each; i++) load_words(staged[i], first + i * pass * pitch, mine);
        } else {
#pragma unroll
            for (int i = 0; i < each; i++) {
                const uint32_t mine = smaller(row + i * pass, valid - 1) * pitch + at;
                load_words(staged[i], first, mine);
            }
            scheduling_barrier();  // the compiler would join the branches' loads, and add their addresses in vector registers
        }
    }
    __device__ void end(SharedTile<HD> to) const {
        const int row = static_cast<int>(threadIdx.x) / chunks,
                  chunk = static_cast<int>(threadIdx.x) % chunks;
        char* const at = to.at(row, chunk);
#pragma unroll
        for (int i = 0; i < each; i++)
            *reinterpret_cast<uint4*>(at + i * pass * HD * 2) =
                make_uint4(staged[i][0], staged[i][1], staged[i][2], staged[i][3]);
    }
};

// Rows x HD in LDS with columns as rows, so that the operands of a product that sums over the rows are 128-bit reads. 64 rows
// are eight chunks of eight: chunk 4 j + g has the rows 32 j + 16 i + 4 g + {0 to 3}, i < 2, those of lane group g in two
// products with operands that were accumulators.
template <int HD>
struct ColumnTile {
    static constexpr int rows = 64;
    char* data;

    static constexpr int64_t bytes = int64_t{rows} * HD * 2;
    static constexpr __device__ int row_of(int chunk, int i) {
        return chunk / 4 * 32 + i / 4 * 16 + chunk % 4 * 4 + i % 4;
    }
    // `chunk` of a column that is `tile` times 16 further than that of `lane`, at(column, chunk % 4) - data: four addresses for all
    // tiles.
    __device__ const char* at(int lane, int tile, int chunk) const {
        return data + (lane ^ ((chunk & 4) ^ (2 * tile & 7)) * 16) + tile * 16 * rows * 2;
    }
    // Columns that one access reads or writes differ in what their chunks are xor-ed with.
    __device__ char* at(int column, int chunk) const {
        return data + column * rows * 2 + ((chunk ^ column ^ column / 8) & 7) * 16;
    }
};

// As RowsCopy, to a ColumnTile: a thread has a chunk of `width` neighbouring columns.
template <int HD, int threads>
struct ColumnsCopy {
    static constexpr int rows = ColumnTile<HD>::rows, lanes = threads / 8, width = HD / lanes;
    static_assert(width == 2 || width == 4);
    uint32_t staged[8][width / 2];

    __device__ void begin(const char* first, int pitch, int valid) {
        const int chunk = static_cast<int>(threadIdx.x) / lanes;
        const int at = static_cast<int>(threadIdx.x) % lanes * width * 2;
        if (valid >= rows) {
            const uint32_t mine = optimization_barrier(ColumnTile<HD>::row_of(chunk, 0) * pitch + at);
#pragma unroll
            for (int i = 0; i < 8; i++)
                load_words(staged[i], first + ColumnTile<HD>::row_of(0, i) * pitch, mine);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint32_t mine = smaller(ColumnTile<HD>::row_of(chunk, i), valid - 1) * pitch + at;
                load_words(staged[i], first, mine);
            }
            scheduling_barrier();  // the compiler would join the branches' loads, and add their addresses in vector registers
        }
    }
    __device__ void end(ColumnTile<HD> to) const {
        const int chunk = static_cast<int>(threadIdx.x) / lanes;
        const int column = static_cast<int>(threadIdx.x) % lanes * width;
#pragma unroll
        for (int w = 0; w < width; w++) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t even = staged[2 * i][w / 2], odd = staged[2 * i + 1][w / 2];
                words[i] = w % 2 ? upper_halves(even, odd) : lower_halves(even, odd);
            }
            *reinterpret_cast<uint4*>(to.at(column + w, chunk)) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
};

// The operands of a product come from LDS: f(i, operands) multiplies with those of read(operands, i), i < reads, and reads are
// issued `ahead` products before. The compiler's own order has them just before.
template <int reads, int ahead, class T, class Read, class Multiply>
__device__ void products_with_reads(Read read, Multiply multiply) {
    typename T::Operand ring[ahead + 1][2];
#pragma unroll
    for (int i = 0; i < ahead; i++) read(ring[i], i);
#pragma unroll
    for (int i = 0; i < reads; i++) {
        if (i + ahead < reads) read(ring[(i + ahead) % (ahead + 1)], i + ahead);
        scheduling_barrier();
        multiply(i, ring[i % (ahead + 1)]);
        scheduling_barrier();
    }
}

}  // namespace llamac
#endif
