// tile.h for MFMA. Products are computed transposed, c' = b a': a lane then holds one row of c, four neighbouring
// columns at a time, which is the layout of an operand's row.
#pragma once
#include "platform/tile_interleaved.h"

namespace llamac {

using Machine = Mfma;
constexpr int tile_rows = 16;

// R = 16: 16 deep an instruction, lanes in four groups; R = 32: 8 deep, two groups.
template <int R>
struct Tile : InterleavedColumns<Tile<R>, R, 8> {
    static constexpr int groups = 64 / R, steps = R / 16;
    static constexpr int slots = 1, elements = R * R / 64;
    static constexpr int depth = 2 / steps;  // operands that load_rows<Order::any> gives at once
    struct Operand {
        uint32_t words[steps][2];
    };
    using RightOperand = Operand;
    struct Accumulator {
        float x[elements];
    };

    static __device__ int group() { return static_cast<int>(threadIdx.x) % 64 / R; }
    static __device__ int row(int = 0) { return static_cast<int>(threadIdx.x) % R; }
    static constexpr __device__ int slot(int) { return 0; }
    static __device__ int column(int i) { return 4 * (groups * (i / 4) + group()) + i % 4; }
    // Over the lanes that hold the same row.
    static __device__ float row_max(float x) {
        for (int distance = R; distance < 64; distance *= 2) x = fmaxf(x, __shfl_xor(x, distance));
        return x;
    }
    static __device__ float row_sum(float x) {
        for (int distance = R; distance < 64; distance *= 2) x += __shfl_xor(x, distance);
        return x;
    }

    template <class E>
    static __device__ void multiply(Accumulator& c, const Operand& a, const Operand& b) {
        for (int s = 0; s < steps; s++) mfma<R, E>(c.x, b.words[s], a.words[s]);
    }
    // Of operands whose words are four fp8 each: k is twice as deep.
    template <class A, class B>
    static __device__ void multiply_fp8(Accumulator& c, const Operand& a, const Operand& b) {
        static_assert(R == 16);
        mfma_fp8<B, A>(c.x, b.words[0], a.words[0]);
    }
    // Columns 16 * part to 16 * part + 15. Rounds bf16's ties away from zero: there is no instruction that rounds to it.
    template <class E>
    static __device__ Operand as_operand(const Accumulator& c, int part) {
        Operand out;
        for (int s = 0; s < steps; s++)
            for (int w = 0; w < 2; w++) {
                const float* x = c.x + 4 * (part * steps + s) + 2 * w;
                if constexpr (E::mantissa == 7)
                    out.words[s][w] =
                        upper_halves(__float_as_uint(x[0]) + 0x8000u, __float_as_uint(x[1]) + 0x8000u);
                else
                    out.words[s][w] = fp16_pair(x[0], x[1]);
            }
        return out;
    }

    // Rows from `first`, k from `k` on, a multiple of 16. Order::any: 128 bits a lane serve two instructions,
    // k is a multiple of 16 * depth.
    template <Order order, int count, int columns>
    static __device__ void load_rows(Operand (&out)[count], SharedTile<columns> from, int first, int k) {
        if constexpr (order == Order::any) {
            static_assert(count % depth == 0);
            for (int d = 0; d < count * steps; d += 2) {
                // Pairs of words: of single ones, the compiler loads some twice for operands of 64 bits.
                struct alignas(16) Pairs {
                    uint64_t even, odd;
                };
                const Pairs bits =
                    *reinterpret_cast<const Pairs*>(from.at(first + row(), k / 8 + d * groups / 2 + group()));
                __builtin_memcpy(out[d / steps].words[0], &bits.even, 8);
                __builtin_memcpy(out[(d + 1) / steps].words[(d + 1) % steps], &bits.odd, 8);
            }
        } else {
            for (int d = 0; d < count * steps; d++) {
                const int quarter = k / 4 + d * groups + group();
                const uint2 bits =
                    *reinterpret_cast<const uint2*>(from.at(first + row(), quarter / 2) + quarter % 2 * 8);
                out[d / steps].words[d % steps][0] = bits.x;
                out[d / steps].words[d % steps][1] = bits.y;
            }
        }
    }
    // load_rows<Order::natural>, back: R rows from `first` on, k from `k` on.
    template <int columns>
    static __device__ void store_operand(SharedTile<columns> to, int first, int k, const Operand& x) {
        for (int s = 0; s < steps; s++) {
            const int quarter = k / 4 + s * groups + group();
            *reinterpret_cast<uint2*>(to.at(first + row(), quarter / 2) + quarter % 2 * 8) =
                make_uint2(x.words[s][0], x.words[s][1]);
        }
    }
    // Operands `first` to `first + width - 1` of the `count` that hold all columns from `column` on; k is the
    // first of 16 rows. A lane takes `width` neighbouring columns of four rows and gives one to each.
    template <int count>
    static constexpr int width = InterleavedColumns<Tile<R>, R, 8>::template width<count>;
    template <Order order, int count, int columns>
    static __device__ void load_columns(Operand (&out)[width<count>], SharedTile<columns> from, int k,
                                        int first, int column = 0) {
        constexpr int w = width<count>;
        for (int s = 0; s < steps; s++) {
            // The rows that load_rows<order> has at this place.
            const int top = order == Order::natural ? k + 4 * (groups * s + group())
                            : R == 16               ? k / 32 * 32 + 8 * group() + k / 16 % 2 * 4
                                                    : k + 8 * group() + 4 * s;
            uint32_t rows[4][w / 2];
            for (int j = 0; j < 4; j++) read_words(rows[j], from, top + j, column + first * R + w * row());
            for (int t = 0; t < w; t++)
                for (int half = 0; half < 2; half++) {
                    const uint32_t even = rows[2 * half][t / 2], odd = rows[2 * half + 1][t / 2];
                    out[t].words[s][half] = t % 2 ? upper_halves(even, odd) : lower_halves(even, odd);
                }
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
