// A block's copy of a tile from memory to LDS, on its way while the block computes.
#pragma once

namespace llamac {

// `rows` rows of `columns` bf16 by a block of `threads`. Between begin() and end() nobody may use the
// SharedTile; after end() and a __syncthreads everybody may read it. Copies of one thread end in the order in
// which they began.
template <int rows, int columns, int threads>
struct TileCopy {
    static constexpr int chunks = rows * columns / 8, each = (chunks + threads - 1) / threads;

    // from: the first row, rows are `stride` elements apart. What lies at or beyond valid_rows, valid_columns
    // (a multiple of 8) is zero and not read.
    template <class T>
    __device__ void begin(SharedTile<columns> to, const T* from, int64_t stride, int valid_rows,
                          int valid_columns = columns) {
        static_assert(sizeof(T) == 2);
        shared = to;
        for (int i = 0; i < each; i++) {
            const int row = index(i) / (columns / 8), chunk = index(i) % (columns / 8);
            if (chunks % threads != 0 && index(i) >= chunks) break;
            const bool valid = row < valid_rows && chunk * 8 < valid_columns;
            const void* source = valid ? from + row * stride + chunk * 8 : from;
#if defined(LLAMAC_NVIDIA)
            copy_asynchronously(shared.at(row, chunk), source, valid);
#else
            staged[i] = valid ? *static_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
#if defined(LLAMAC_CPU)
            // Where copies are asynchronous the tile changes from here on.
            *reinterpret_cast<uint4*>(shared.at(row, chunk)) = make_uint4(~0u, ~0u, ~0u, ~0u);
#endif
#endif
        }
#if defined(LLAMAC_NVIDIA)
        commit_copies();
#endif
    }
    // A copy of nothing: keeps the count of copies that end<pending>() goes by.
    __device__ void begin_none() {
#if defined(LLAMAC_NVIDIA)
        commit_copies();
#else
        shared.data = nullptr;
#endif
    }
    // pending: how many later copies of this thread may still be on their way.
    template <int pending = 0>
    __device__ void end() {
#if defined(LLAMAC_NVIDIA)
        wait_for_copies<pending>();
#else
        if (!shared.data) return;
        for (int i = 0; i < each; i++) {
            if (chunks % threads != 0 && index(i) >= chunks) break;
            *reinterpret_cast<uint4*>(shared.at(index(i) / (columns / 8), index(i) % (columns / 8))) =
                staged[i];
        }
#endif
    }

  private:
    SharedTile<columns> shared;
#if !defined(LLAMAC_NVIDIA)
    uint4 staged[each];
#endif
    static __device__ int index(int i) { return static_cast<int>(threadIdx.x) + i * threads; }
};

// The way back: rows of LDS to memory, those below valid_rows. After a __syncthreads.
template <int rows, int columns, int threads, class T>
__device__ void store_tile(T* to, int64_t stride, SharedTile<columns> from, int valid_rows) {
    static_assert(sizeof(T) == 2);
    for (int i = static_cast<int>(threadIdx.x); i < rows * columns / 8; i += threads) {
        const int row = i / (columns / 8), chunk = i % (columns / 8);
        if (row < valid_rows)
            store_vector(reinterpret_cast<uint4*>(to + row * stride + chunk * 8),
                         *reinterpret_cast<const uint4*>(from.at(row, chunk)));
    }
}

}  // namespace llamac
