// How blocks cover the elements of [N, F] where a thread has the same vector of columns in a few rows.
#pragma once
#include <algorithm>

#include "core/device.h"

namespace llamac {

// `across` blocks side by side hold a row (blockIdx.x % across), threads.x vectors each; where a row has fewer than a block has
// threads, threads.y rows lie one below the other in it. A thread's rows lie threads.y apart.
struct RowTiles {
    dim3 threads;
    unsigned across, blocks;
};
// Vectors of `size` elements, rows_per_thread rows, at most `threads` threads per block.
inline RowTiles row_tiles(int64_t N, int64_t F, int size, int rows_per_thread, int threads) {
    const int64_t vectors = (F + size - 1) / size;
    const unsigned columns = static_cast<unsigned>(std::min<int64_t>(vectors, threads));
    const unsigned down = static_cast<unsigned>(threads) / columns, across = blocks_for(vectors, columns);
    const int64_t rows = int64_t{rows_per_thread} * down;
    return {dim3(columns, down), across, blocks_for(int64_t{across} * blocks_for(N, rows), 1)};
}

}  // namespace llamac
