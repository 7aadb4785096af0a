// Shared by the kernels `mfma` of attention, for CDNA3: tiles on their way from memory to LDS, and the order in which a wave
// issues matrix instructions and reads of LDS.
#pragma once
#include "core/device.h"
#include "ops/attention/attention.h"
#include "ops/attention/flash.h"
#include "platform/tile.h"

#if defined(LLAMAC_MFMA)
namespace llamac {

bool mfma_supports(const Call& call);  // mfma_forward.hip
constexpr Constraints mfma_constraints{
    "HD 64 or 128, T and S at most 2^30, scale above 0, heads that begin at multiples of 16 bytes, rows of "
    "q, k, v and dout at most 2^23 elements apart",
    mfma_supports};
constexpr const char* mfma_chip = "AMD gfx942";

// block_tile_of() in scalar registers, and with it what is computed from it.
__device__ inline BlockTile uniform_block_tile(int blocks, int heads) {
    const BlockTile tile =
        block_tile_of<int>(blocks, heads, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    const auto uniform = [](int64_t x) { return int64_t{warp_uniform(static_cast<int>(x))}; };
    return {uniform(tile.batch), uniform(tile.head), uniform(tile.block)};
}

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
            wait_for_loads();  // else the other branch, which reuses registers, would wait for loads before it
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

// `rows` x HD in LDS with columns as rows, so that the operands of a product that sums over the rows are 128-bit reads. Rows
// are in chunks of eight: chunk 4 j + g has the rows 32 j + 16 i + 4 g + {0 to 3}, i < 2, those of lane group g in two products
// with operands that were accumulators.
template <int rows, int HD>
struct ColumnTile {
    static_assert(rows == 32 || rows == 64);
    static constexpr int bytes = rows * HD * 2, chunks = rows / 8;
    char* data;

    static constexpr __device__ int row_of(int chunk, int i) {
        return chunk / 4 * 32 + i / 4 * 16 + chunk % 4 * 4 + i % 4;
    }
    // Columns that one access reads or writes differ in what their places in 128 bytes are xor-ed with.
    static constexpr __device__ int offset(int column, int chunk) {
        const int line = rows == 64 ? column : column / 2,
                  place = rows == 64 ? chunk : column % 2 * 4 + chunk;
        const int flip = rows == 64 ? (column ^ column / 8) & 7 : (line & 3) ^ column / 8 % 2 * 4;
        return line * 128 + (place ^ flip) * 16;
    }
    // offset(column + 16 * tile, chunk + 4 * j) of the offset(column, chunk) that a lane keeps, chunk < 4: few addresses.
    static constexpr __device__ int further(int kept, int tile, int j) {
        return (rows == 64 ? kept ^ (4 * j ^ (2 * tile & 7)) * 16 : kept) + tile * 16 * rows * 2;
    }
};

// As RowsCopy, to a ColumnTile: of `threads`, this one has a chunk of `width` neighboring columns.
template <int rows, int HD, int threads>
struct ColumnsCopy {
    using Tile = ColumnTile<rows, HD>;
    static constexpr int lanes = threads / Tile::chunks, width = HD / lanes;
    static_assert(width == 2 || width == 4);
    uint32_t staged[8][width / 2];

    __device__ void begin(const char* first, int pitch, int valid, int thread) {
        const int chunk = thread / lanes;
        const int at = thread % lanes * width * 2;
        if (valid >= rows) {
            const uint32_t mine = optimization_barrier(Tile::row_of(chunk, 0) * pitch + at);
#pragma unroll
            for (int i = 0; i < 8; i++) load_words(staged[i], first + Tile::row_of(0, i) * pitch, mine);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint32_t mine = smaller(Tile::row_of(chunk, i), valid - 1) * pitch + at;
                load_words(staged[i], first, mine);
            }
            wait_for_loads();  // else the other branch, which reuses registers, would wait for loads before it
        }
    }
    __device__ void end(Tile to, int thread) const {
        const int chunk = thread / lanes, column = thread % lanes * width;
#pragma unroll
        for (int w = 0; w < width; w++) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t even = staged[2 * i][w / 2], odd = staged[2 * i + 1][w / 2];
                words[i] = w % 2 ? upper_halves(even, odd) : lower_halves(even, odd);
            }
            *reinterpret_cast<uint4*>(to.data + Tile::offset(column + w, chunk)) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
};

using Pair = float __attribute__((vector_size(8)));  // one instruction adds or multiplies two

// Probabilities are 2^(x + raised), cut to bf16: the factor is, on average, the half unit that cutting takes, and rounding
// needs no instructions.
template <class E>
constexpr float raised = E::mantissa == 7 ? 1.0f / 256 : 0.0f;
template <class E>
constexpr float raised_factor = E::mantissa == 7 ? 1.00271127505020f : 1.0f;  // 2^raised
template <class E>
__device__ uint32_t cut(Pair x) {
    if constexpr (E::mantissa == 7)
        return upper_halves(__float_as_uint(x[0]), __float_as_uint(x[1]));
    else
        return fp16_pair(x[0], x[1]);
}

// The operands of a product come from LDS: f(i, operands) multiplies with those of read(operands, i), i < reads, and reads are
// issued `ahead` products before. The compiler's own order has them just before.
template <int reads, int ahead, class Read, class Multiply>
__device__ void products_with_reads(Read read, Multiply multiply) {
    Tile::Operand ring[ahead + 1][2];
    set_priority<1>();  // of two waves of a SIMD the one in its products goes first
#pragma unroll
    for (int i = 0; i < ahead; i++) read(ring[i], i);
#pragma unroll
    for (int i = 0; i < reads; i++) {
        if (i + ahead < reads) read(ring[(i + ahead) % (ahead + 1)], i + ahead);
        scheduling_barrier();
        multiply(i, ring[i % (ahead + 1)]);
        scheduling_barrier();
    }
    set_priority<0>();
}
// s += a b': rows with rows.
template <class E, int ahead, int HD, int row_tiles, int count>
__device__ void add_product(Tile::Accumulator (&s)[row_tiles][count],
                            const WarpRows<Tile, HD, row_tiles, true>& a, SharedTile<HD> b) {
    using T = Tile;
    products_with_reads<count * HD / 32, ahead>(
        [&](T::Operand(&rows)[2], int i) { T::load_rows(rows, b, i % count * 16, i / count * 32); },
        [&](int i, const T::Operand(&rows)[2]) {
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int r = 0; r < row_tiles; r++)
                    T::multiply<E>(s[r][i % count], a.operands[r][i / count * 2 + h], rows[h]);
        });
}
// o += p b. kept: b.offset(T::row(), T::group()).
template <class E, int ahead, int rows, int HD, int row_tiles>
__device__ void add_product(Tile::Accumulator (&o)[row_tiles][HD / 16],
                            const Tile::Operand (&p)[row_tiles][rows / 16], ColumnTile<rows, HD> b,
                            int kept) {
    using T = Tile;
    constexpr int parts = rows / 32;
    products_with_reads<HD / 16 * parts, ahead>(
        [&](T::Operand(&columns)[2], int i) {
            const uint4 bits =
                *reinterpret_cast<const uint4*>(b.data + b.further(kept, i / parts, i % parts));
            columns[0] = {{bits.x, bits.y}}, columns[1] = {{bits.z, bits.w}};
        },
        [&](int i, const T::Operand(&columns)[2]) {
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int r = 0; r < row_tiles; r++)
                    T::multiply<E>(o[r][i / parts], p[r][i % parts * 2 + h], columns[h]);
        });
}

}  // namespace llamac
#endif
