// tile.h for WMMA (gfx11, 32 lanes). Products are computed transposed, c' = b a': lane l then holds row l % 16 of c,
// lanes 0 to 15 its even columns, and lanes 16 to 31 its odd columns. Both halves hold the operands.
#pragma once
#include "platform/tile_interleaved.h"

namespace llamac {

using Machine = Wmma;

// Four columns at once: more would not fit in registers.
struct Tile : InterleavedColumns<Tile, 4> {
    static constexpr int slots = 1, elements = 8;
    static constexpr int depth = 1;  // operands that load_rows gives at once
    struct Operand {
        uint32_t words[8];
    };
    using RightOperand = Operand;
    struct Accumulator {
        float x[elements];
    };

    static __device__ int upper() { return static_cast<int>(threadIdx.x) / 16 % 2; }
    static __device__ int row(int = 0) { return static_cast<int>(threadIdx.x) % 16; }
    static constexpr __device__ int slot(int) { return 0; }
    static __device__ int column(int i) { return 2 * i + upper(); }
    static __device__ float row_max(float x) { return fmaxf(x, __shfl_xor(x, 16)); }
    static __device__ float row_sum(float x) { return x + __shfl_xor(x, 16); }

    template <class E>
    static __device__ void multiply(Accumulator& c, const Operand& a, const Operand& b) {
        wmma<E>(c.x, b.words, a.words);
    }
    template <class A, class B>
    static void multiply_fp8(Accumulator& c, const Operand& a, const Operand& b) = delete;
    // A column pair is put together from both halves. Rounds bf16's ties away from zero.
    template <class E>
    static __device__ Operand as_operand(const Accumulator& c) {
        Operand out;
        for (int i = 0; i < elements; i++) {
            const uint32_t own = E::mantissa == 7 ? __float_as_uint(c.x[i]) + 0x8000u
                                                  : uint32_t{fp16_bits(c.x[i])} << 16,
                           other = __shfl_xor(own, 16);
            out.words[i] = upper() ? upper_halves(other, own) : upper_halves(own, other);
        }
        return out;
    }

    template <int count, int columns>
    static __device__ void load_rows(Operand (&out)[count], SharedTile<columns> from, int first, int k) {
        for (int d = 0; d < count; d++)
            for (int half = 0; half < 2; half++) {
                const uint4 bits = *reinterpret_cast<const uint4*>(
                    from.at(from.offset(row(), 0), first, k / 8 + 2 * d + half));
                uint32_t* words = out[d].words + 4 * half;
                words[0] = bits.x, words[1] = bits.y, words[2] = bits.z, words[3] = bits.w;
            }
    }
    // As for MFMA; a lane takes `width` neighboring columns of 16 rows and gives one to each operand.
    template <Order, int count, int columns>
    static __device__ void load_columns(Operand (&out)[width<count>], SharedTile<columns> from, int k,
                                        int first, int column = 0) {
        constexpr int w = width<count>;
        for (int j = 0; j < 16; j += 2) {
            const int own = column + first * 16 + w * row(), place = from.offset(0, own / 8);
            uint32_t even[w / 2], odd[w / 2];
            __builtin_memcpy(even, from.at(place, k + j, from.swizzle(j)) + own % 8 * 2, sizeof(even));
            __builtin_memcpy(odd, from.at(place, k + j + 1, from.swizzle(j + 1)) + own % 8 * 2, sizeof(odd));
            for (int t = 0; t < w; t++)
                out[t].words[j / 2] =
                    t % 2 ? upper_halves(even[t / 2], odd[t / 2]) : lower_halves(even[t / 2], odd[t / 2]);
        }
    }
};

}  // namespace llamac
