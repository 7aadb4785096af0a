// tile.h for MFMA. Products are computed transposed, c' = b a': a lane then holds one row of c, four neighboring
// columns at a time, which is the layout of an operand's row.
#pragma once
#include "platform/tile_interleaved.h"

namespace llamac {

using Machine = Mfma;

struct Tile : InterleavedColumns<Tile, 8> {
    static constexpr int slots = 1, elements = 4;
    static constexpr int depth = 2;  // operands that load_rows gives at once
    struct Operand {
        uint32_t words[2];
    };
    using RightOperand = Operand;
    struct Accumulator {
        float x[elements];
    };

    static __device__ int group() { return static_cast<int>(threadIdx.x) % 64 / 16; }
    static __device__ int row(int = 0) { return static_cast<int>(threadIdx.x) % 16; }
    static constexpr __device__ int slot(int) { return 0; }
    static __device__ int column(int i) { return 4 * group() + i; }
    // Over the lanes that hold the same row.
    static __device__ float row_max(float x) {
        for (int distance = 16; distance < 64; distance *= 2) x = fmaxf(x, __shfl_xor(x, distance));
        return x;
    }
    static __device__ float row_sum(float x) {
        for (int distance = 16; distance < 64; distance *= 2) x += __shfl_xor(x, distance);
        return x;
    }

    template <class E>
    static __device__ void multiply(Accumulator& c, const Operand& a, const Operand& b) {
        mfma<E>(c.x, b.words, a.words);
    }
    // Of operands whose words are four fp8 each: k is twice as deep.
    template <class A, class B>
    static __device__ void multiply_fp8(Accumulator& c, const Operand& a, const Operand& b) {
        mfma_fp8<B, A>(c.x, b.words, a.words);
    }
    // Rounds bf16's ties away from zero: there is no instruction that rounds to it.
    template <class E>
    static __device__ Operand as_operand(const Accumulator& c) {
        Operand out;
        for (int w = 0; w < 2; w++) {
            const float* x = c.x + 2 * w;
            if constexpr (E::mantissa == 7)
                out.words[w] = upper_halves(__float_as_uint(x[0]) + 0x8000u, __float_as_uint(x[1]) + 0x8000u);
            else
                out.words[w] = fp16_pair(x[0], x[1]);
        }
        return out;
    }

    // Rows from `first`, k from `k` on, a multiple of 16 * depth: 128 bits a lane serve two instructions.
    template <int count, int columns>
    static __device__ void load_rows(Operand (&out)[count], SharedTile<columns> from, int first, int k) {
        static_assert(count % depth == 0);
        for (int d = 0; d < count; d += 2) {
            // Pairs of words: of single ones, the compiler loads some twice for operands of 64 bits.
            struct alignas(16) Pairs {
                uint64_t even, odd;
            };
            const Pairs bits =
                *reinterpret_cast<const Pairs*>(from.at(first + row(), k / 8 + 2 * d + group()));
            __builtin_memcpy(out[d].words, &bits.even, 8);
            __builtin_memcpy(out[d + 1].words, &bits.odd, 8);
        }
    }
    // An operand of as_operand() to 16 rows from `first` on, k from `k` on.
    template <int columns>
    static __device__ void store_operand(SharedTile<columns> to, int first, int k, const Operand& x) {
        const int quarter = k / 4 + group();
        *reinterpret_cast<uint2*>(to.at(first + row(), quarter / 2) + quarter % 2 * 8) =
            make_uint2(x.words[0], x.words[1]);
    }
    // Operands `first` to `first + width - 1` of the `count` that hold all columns from `column` on; k is the
    // first of 16 rows. A lane takes `width` neighboring columns of four rows and gives one to each.
    template <Order order, int count, int columns>
    static __device__ void load_columns(Operand (&out)[width<count>], SharedTile<columns> from, int k,
                                        int first, int column = 0) {
        constexpr int w = width<count>;
        // The rows that operands of this order have at this place.
        const int top =
            order == Order::natural ? k + 4 * group() : k / 32 * 32 + 8 * group() + k / 16 % 2 * 4;
        uint32_t rows[4][w / 2];
        for (int j = 0; j < 4; j++) read_words(rows[j], from, top + j, column + first * 16 + w * row());
        for (int t = 0; t < w; t++)
            for (int half = 0; half < 2; half++) {
                const uint32_t even = rows[2 * half][t / 2], odd = rows[2 * half + 1][t / 2];
                out[t].words[half] = t % 2 ? upper_halves(even, odd) : lower_halves(even, odd);
            }
    }

  private:
    template <int n, int columns>
    static __device__ void read_words(uint32_t (&out)[n], SharedTile<columns> from, int row, int column) {
        const char* at = from.at(row, column / 8) + column % 8 * 2;
        if constexpr (n == 4) {
            const uint4 bits = *reinterpret_cast<const uint4*>(at);
            out[0] = bits.x, out[1] = bits.y, out[2] = bits.z, out[3] = bits.w;
        } else if constexpr (n == 2) {
            const uint2 bits = *reinterpret_cast<const uint2*>(at);
            out[0] = bits.x, out[1] = bits.y;
        } else {
            out[0] = *reinterpret_cast<const uint32_t*>(at);
        }
    }
};

}  // namespace llamac
