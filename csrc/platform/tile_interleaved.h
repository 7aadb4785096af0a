// For platforms without an instruction that transposes while it reads LDS: a lane of load_columns reads `width`
// neighboring columns and distributes them, one to each of `width` tiles. The columns of a tile are then `width`
// apart, and `width` of them are stored next to each other. For tiles of which a lane holds one row.
#pragma once

namespace llamac {

// Self: the Tile. most: columns a lane takes at once.
template <class Self, int most>
struct InterleavedColumns {
    template <int count>
    static constexpr int width = count < most ? count : most;

    // Of a product with load_columns of `count` operands: the column that column `c` of tile `o` is.
    template <int count>
    static constexpr __device__ int interleaved(int o, int c) {
        constexpr int w = width<count>;
        static_assert(count % w == 0 && (w == 2 || w == 4 || w == 8));
        return o / w * w * tile_rows + w * c + o % w;
    }
    // The rows of `count` tiles that are such a product, rounded to E, into rows of LDS from `first` on.
    template <class E, int count, int columns, class Accumulator>
    static __device__ void store_rows(SharedTile<columns> to, int first, const Accumulator (&c)[count]) {
        constexpr int w = width<count>;
        for (int o = 0; o < count; o += w)
            for (int i = 0; i < Self::elements; i++) {
                const int place = interleaved<count>(o, Self::column(i));
                uint32_t words[w / 2];
                for (int t = 0; t < w; t += 2) words[t / 2] = pair_bits<E>(c[o + t].x[i], c[o + t + 1].x[i]);
                __builtin_memcpy(to.at(first + Self::row(), place / 8) + place % 8 * 2, words, sizeof(words));
            }
    }

  private:
    InterleavedColumns() = default;
    friend Self;
};

}  // namespace llamac
