// tile.h for mma.sync.m16n8k16: two of them make a tile. Lane l holds rows l / 4 and l / 4 + 8.
#pragma once

namespace llamac {

using Machine = MmaSync;

struct Tile {
    static constexpr int slots = 2, elements = 8;
    // As the a of one instruction; words 0 and 2, 1 and 3 are the b of the two.
    static constexpr int depth = 1;  // operands that load_rows gives at once
    struct Operand {
        uint32_t words[4];
    };
    // The other way round: words 0 and 1, 2 and 3. An instruction wants its b in neighboring registers.
    struct RightOperand {
        uint32_t words[4];
    };
    struct Accumulator {
        float x[elements];
    };

    static __device__ int lane() { return static_cast<int>(threadIdx.x) % warp_size; }
    static __device__ int row(int slot) { return lane() / 4 + slot * 8; }
    static constexpr __device__ int slot(int i) { return i / 2 % 2; }
    static __device__ int column(int i) { return lane() % 4 * 2 + i % 2 + i / 4 * 8; }
    // Over the lanes that hold the same row.
    static __device__ float row_max(float x) {
        x = fmaxf(x, __shfl_xor(x, 1));
        return fmaxf(x, __shfl_xor(x, 2));
    }
    static __device__ float row_sum(float x) {
        x += __shfl_xor(x, 1);
        return x + __shfl_xor(x, 2);
    }

    template <class E>
    static __device__ void multiply(Accumulator& c, const Operand& a, const Operand& b) {
        mma_m16n8k16<E>(c.x, a.words, b.words[0], b.words[2]);
        mma_m16n8k16<E>(c.x + 4, a.words, b.words[1], b.words[3]);
    }
    template <class E>
    static __device__ void multiply(Accumulator& c, const Operand& a, const RightOperand& b) {
        mma_m16n8k16<E>(c.x, a.words, b.words[0], b.words[1]);
        mma_m16n8k16<E>(c.x + 4, a.words, b.words[2], b.words[3]);
    }
    // Of operands whose words are four fp8 each: k is twice as deep.
    template <class A, class B>
    static __device__ void multiply_fp8(Accumulator& c, const Operand& a, const RightOperand& b) {
        mma_m16n8k32<A, B>(c.x, a.words, b.words[0], b.words[1]);
        mma_m16n8k32<A, B>(c.x + 4, a.words, b.words[2], b.words[3]);
    }
    template <class E>
    static __device__ Operand as_operand(const Accumulator& c) {
        return {{pair_bits<E>(c.x[0], c.x[1]), pair_bits<E>(c.x[2], c.x[3]), pair_bits<E>(c.x[4], c.x[5]),
                 pair_bits<E>(c.x[6], c.x[7])}};
    }

    // Rows from `first`, k from `k` on, a multiple of 16.
    template <class O, int count, int columns>
    static __device__ void load_rows(O (&out)[count], SharedTile<columns> from, int first, int k) {
        const int kept = std::is_same_v<O, Operand>
                             ? from.offset(lane() % 16, lane() / 16)
                             : from.offset(lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
        for (int d = 0; d < count; d++)
            ldmatrix<false>(out[d].words, place(from, kept, first, k / 8 + 2 * d));
    }
    // Operands `first` to `first + width - 1` of the `count` that hold all columns from `column` on, 16 each;
    // k is the first of 16 rows.
    template <int>
    static constexpr int width = 2;
    template <Order, int count, class O, int columns>
    static __device__ void load_columns(O (&out)[width<count>], SharedTile<columns> from, int k, int first,
                                        int column = 0) {
        const int kept = std::is_same_v<O, Operand>
                             ? from.offset(lane() % 8 + lane() / 16 * 8, lane() / 8 % 2)
                             : from.offset(lane() % 16, lane() / 16);
        for (int o = 0; o < width<count>; o++)
            ldmatrix<true>(out[o].words, place(from, kept, k, column / 8 + 2 * (first + o)));
    }
    // Of a product with load_columns of `count` operands: the column that column `c` of tile `o` is.
    template <int count>
    static constexpr __device__ int interleaved(int o, int c) {
        return 16 * o + c;
    }
    // The rows of `count` tiles that are such a product, rounded to E, into rows of LDS from `first` on.
    template <class E, int count, int columns>
    static __device__ void store_rows(SharedTile<columns> to, int first, const Accumulator (&c)[count]) {
        for (int o = 0; o < count; o++)
            for (int i = 0; i < elements; i += 2)
                *reinterpret_cast<uint32_t*>(to.at(first + row(slot(i)), 2 * o + i / 4) + lane() % 4 * 4) =
                    pair_bits<E>(c[o].x[i], c[o].x[i + 1]);
    }

  private:
    // from.at(kept, rows, flip) with few registers: flips that differ by 8 chunks, and rows, differ by what an
    // instruction adds by itself.
    template <int columns>
    static __device__ SharedAddress place(SharedTile<columns> from, int kept, int rows, int flip) {
        return settled(shared_address(from.data) + (kept ^ flip % 8 * 16)) +
               (rows * from.chunks * 16 + flip / 8 * 128);
    }
};

}  // namespace llamac
