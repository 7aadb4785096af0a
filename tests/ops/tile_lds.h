// SharedTile's places, and its ways from memory and back, for check_tile.cpp.
#pragma once
#include "tile_matrix.h"

namespace llamac {

// MI300X reads 16 bytes a lane in these groups of eight lanes, and in the same of the upper half (Composable
// Kernel, "Understanding AMD GPU LDS and Bank Conflicts"). at: of each chunk of 32 rows.
inline void check_phases(const std::vector<int>& at, int chunks, int columns) {
    constexpr int groups[4][2] = {{0, 20}, {4, 16}, {8, 28}, {12, 24}};
    const auto apart = [&](auto row, auto chunk) {
        bool all = true;
        for (int phase = 0; phase < 8; phase++) {
            unsigned places = 0;
            for (int i = 0; i < 8; i++) {
                const int lane = phase / 4 * 32 + groups[phase % 4][i / 4] + i % 4;
                places |= 1u << at[row(lane) * chunks + chunk(lane)] % 128 / 16;
            }
            all &= places == 0xff;
        }
        return all;
    };
    for (int k = 0; k < chunks; k += 4)
        check(apart([](int lane) { return lane % 16; }, [=](int lane) { return k + lane / 16; }),
              "load_rows of " + text(columns) + " columns without bank conflicts");
    for (int j = 0; j < 4; j++) {
        check(apart([=](int lane) { return lane / 16 * 4 + j; }, [](int lane) { return lane % 16; }),
              "load_columns of " + text(columns) + " columns without bank conflicts, natural order");
        check(apart([=](int lane) { return lane / 16 * 8 + j; }, [](int lane) { return lane % 16; }),
              "load_columns of " + text(columns) + " columns without bank conflicts, any order");
    }
}

template <int columns>
__global__ void places_in_lds_kernel(int* out, int* kept, int rows, int flip) {
    constexpr int chunks = SharedTile<columns>::chunks;
    const SharedTile<columns> tile{dynamic_shared_memory()};
    for (int i = static_cast<int>(threadIdx.x); i < rows * chunks; i += static_cast<int>(blockDim.x)) {
        const int row = i / chunks, chunk = i % chunks;
        out[i] = static_cast<int>(tile.at(row, chunk) - tile.data);
        kept[i] =
            static_cast<int>(tile.at(tile.offset(row % 8, chunk ^ flip), row / 8 * 8, flip) - tile.data);
    }
}
// Each chunk has a place of its own in its row's 64 or more bytes; at one chunk, any eight rows one after
// another are in the eight different places of 16 bytes that the banks have side by side.
template <int columns>
void check_swizzle() {
    constexpr int rows = 32, chunks = columns / 8;
    const Buffer<int> out(rows * chunks), kept(rows * chunks);
    for (int flip = 0; flip < chunks; flip++) {
        launch(Grid(1, block_threads(), nullptr, SharedTile<columns>::bytes(rows)),
               places_in_lds_kernel<columns>, out.data, kept.data, rows, flip);
        check(out.read() == kept.read(),
              "places of " + text(columns) + " columns from a kept offset, chunks apart by " + text(flip));
    }
    const std::vector<int> at = out.read();
    std::vector<int> times(rows * chunks);
    bool inside = true, apart = true;
    for (int row = 0; row < rows; row++)
        for (int chunk = 0; chunk < chunks; chunk++) {
            const int place = at[row * chunks + chunk];
            inside &= place % 16 == 0 && place / 16 / chunks == row;
            if (inside) times[place / 16]++;
            unsigned places = 0;
            for (int r = row; r < row + 8 && row + 8 <= rows; r++)
                places |= 1u << at[r * chunks + chunk] % 128 / 16;
            apart &= row + 8 > rows || places == 0xff;
        }
    check(inside && times == std::vector<int>(times.size(), 1),
          "each chunk of " + text(columns) + " columns has a place of its own");
    check(apart, "eight rows of " + text(columns) + " columns are in different banks");
    if (columns >= 128) check_phases(at, chunks, columns);
}
TEST(swizzle) {
    check_swizzle<32>();
    check_swizzle<64>();
    check_swizzle<128>();
    check_swizzle<256>();
}

// T: as whose elements the bytes are copied.
template <int rows, int columns, int threads, class T>
__global__ void copy_kernel(bf16* out, const bf16* from, int64_t stride, int valid_rows, int valid_columns) {
    constexpr int parts = sizeof(bf16) / sizeof(T);
    const SharedTile<columns> tile{dynamic_shared_memory()};
    TileCopy<rows, columns, threads> copy;
    copy.begin(tile, reinterpret_cast<const T*>(from), stride * parts, valid_rows, valid_columns * parts);
    copy.end();
    __syncthreads();
    dump(out, tile, rows);
}
// What is read ends with the last valid element: AddressSanitizer sees one more.
template <int rows, int columns, int threads, class T = bf16>
void check_copies() {
    constexpr int stride = columns + 24;
    for (const int valid_rows : {-3, 0, 1, rows - 1, rows, rows + 5})
        for (const int valid_columns : {8, columns - 8, columns}) {
            const int given = std::min(std::max(valid_rows, 1), rows);
            Matrix<bf16> from = integers<bf16>(given, stride, 10);
            from.values.resize(static_cast<size_t>(given - 1) * stride + valid_columns);
            const Buffer<bf16> in(from.values), out(rows * columns);
            launch(Grid(1, threads, nullptr, SharedTile<columns>::bytes(rows)),
                   copy_kernel<rows, columns, threads, T>, out.data, in.data, stride, valid_rows,
                   valid_columns);
            Matrix<bf16> expected{rows, columns};
            for (int m = 0; m < rows; m++)
                for (int n = 0; n < columns; n++)
                    expected(m, n) = m < valid_rows && n < valid_columns ? from(m, n) : bf16(0.0f);
            same(result(out, rows, columns), expected,
                 "copy of " + text(rows) + "x" + text(columns) + " by " + text(threads) + " threads, " +
                     text(valid_rows) + " rows and " + text(valid_columns) + " columns valid");
        }
}

// One tile ahead. At the end once more the tile whose copy was of nothing.
template <int rows, int columns, int threads>
__global__ void stream_kernel(bf16* out, const bf16* from, int steps) {
    constexpr int size = rows * columns;
    const SharedTile<columns> tiles[2] = {{dynamic_shared_memory()}, {dynamic_shared_memory() + size * 2}};
    TileCopy<rows, columns, threads> copies[2];
    copies[0].begin(tiles[0], from, columns, rows);
    for (int s = 0; s < steps; s++) {
        if (s + 1 < steps)
            copies[(s + 1) % 2].begin(tiles[(s + 1) % 2], from + (s + 1) * size, columns, rows);
        else
            copies[(s + 1) % 2].begin_none();
        copies[s % 2].template end<1>();
        __syncthreads();
        dump(out + s * size, tiles[s % 2], rows);
        __syncthreads();
    }
    copies[steps % 2].end();
    __syncthreads();
    dump(out + steps * size, tiles[steps % 2], rows);
}
template <int rows, int columns, int threads>
void check_stream() {
    constexpr int steps = 5;
    const Matrix<bf16> from = integers<bf16>(steps * rows, columns, 11);
    const Buffer<bf16> in(from.values), out(static_cast<size_t>(steps + 1) * rows * columns);
    launch(Grid(1, threads, nullptr, 2 * SharedTile<columns>::bytes(rows)),
           stream_kernel<rows, columns, threads>, out.data, in.data, steps);
    Matrix<bf16> expected{(steps + 1) * rows, columns, from.values};
    expected.values.insert(expected.values.end(), from.values.end() - 2 * rows * columns,
                           from.values.end() - rows * columns);
    same(result(out, expected.rows, columns), expected,
         "two copies of " + text(rows) + "x" + text(columns) + " on their way, then none");
}

template <int rows, int columns, int threads, class T>
__global__ void store_tile_kernel(bf16* out, int64_t stride, const bf16* from, int valid_rows) {
    const SharedTile<columns> tile{dynamic_shared_memory()};
    fill(tile, from, rows);
    store_tile<rows, columns, threads>(reinterpret_cast<T*>(out), stride * (sizeof(bf16) / sizeof(T)), tile,
                                       valid_rows);
}
template <int rows, int columns, int threads, class T = bf16>
void check_store_tile() {
    constexpr int stride = columns + 8;
    for (const int valid_rows : {-1, 0, 1, rows - 1, rows, rows + 3}) {
        const Matrix<bf16> from = integers<bf16>(rows, columns, 12);
        Matrix<bf16> expected = integers<bf16>(rows, stride, 13);
        const Buffer<bf16> in(from.values), out(expected.values);
        launch(Grid(1, threads, nullptr, SharedTile<columns>::bytes(rows)),
               store_tile_kernel<rows, columns, threads, T>, out.data, stride, in.data, valid_rows);
        for (int m = 0; m < std::min(rows, valid_rows); m++)
            for (int n = 0; n < columns; n++) expected(m, n) = from(m, n);
        same(result(out, rows, stride), expected,
             "store_tile of " + text(rows) + "x" + text(columns) + ", " + text(valid_rows) + " rows valid");
    }
}
TEST(copies) {
    check_copies<64, 32, 128>();
    check_copies<64, 128, 256>();
    check_copies<20, 64, 128>();  // 160 chunks: some threads have two, some one
    check_copies<16, 32, 256>();  // 64 chunks: some have none
    check_copies<64, 128, 256, uint8_t>();
    check_stream<32, 128, 128>();
    check_stream<20, 64, 128>();
    check_store_tile<64, 128, 256>();
    check_store_tile<20, 64, 128>();
    check_store_tile<20, 64, 128, uint8_t>();
}

}  // namespace llamac
