// An asynchronous copy of a tile from memory to LDS by a block, while the block computes.
#pragma once

namespace llamac {

// `rows` rows of `columns` numbers of 16 bits, or of as many bytes in another type, by a block of `threads`. No thread may use the
// SharedTile between begin() and end() (with MFMA and WMMA it changes only in end() and can be read until then). After
// end() and a __syncthreads all threads may read it. Copies of one thread end in the order in which they began.
template <int rows, int columns, int threads>
struct TileCopy {
    // A thread's chunks: the same chunk of every `pass`-th row.
    static constexpr int chunks = columns / 8, pass = threads / chunks, each = (rows + pass - 1) / pass;
    static_assert(threads % chunks == 0 && pass % 8 == 0);

    // from: the first row; rows are `stride` < 2^31 elements apart. Elements from valid_rows or valid_columns (whole chunks) on
    // are zero and not read.
    template <class T>
    __device__ void begin(SharedTile<columns> to, const T* from, int64_t stride, int valid_rows,
                          int valid_columns = columns * 2 / int{sizeof(T)}) {
        constexpr int size = 16 / sizeof(T);  // elements of a chunk
        shared = to;
        // The barrier: a loop would keep each chunk's address in registers.
        const int64_t pitch = optimization_barrier_uniform(static_cast<int>(stride));
        const int inside = chunk() * size < valid_columns ? valid_rows - row() : 0;
        const T* source = from + row() * pitch + chunk() * size;
#pragma unroll
        for (int i = 0; i < each; i++) {
            if (rows % pass != 0 && row() + i * pass >= rows) break;
            const bool valid = i * pass < inside;
#if defined(LLAMAC_NVIDIA)
            copy_asynchronously(place(i), source, valid);
#else
            staged[i] = valid ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
#if defined(LLAMAC_CPU) && LLAMAC_WARP == 32
            // Where copies are asynchronous the tile changes from here on.
            *reinterpret_cast<uint4*>(place(i)) = make_uint4(~0u, ~0u, ~0u, ~0u);
#endif
#endif
            source += pass * pitch;
        }
#if defined(LLAMAC_NVIDIA)
        commit_copies();
#endif
    }
#if !defined(LLAMAC_NVIDIA)
    // Where a thread's chunks are, in bytes from a tile's first number: in 32 bits, so a row has at most 2^32 / rows bytes.
    struct Places {
        uint32_t bytes[each];
    };
    // Rows and columns beyond the valid ones, of which there is at least one, have the place of the last.
    template <class T>
    static __device__ Places places(int stride, int valid_rows, int valid_columns) {
        constexpr int size = 16 / sizeof(T);
        const int column = chunk() * size < valid_columns ? chunk() * size : valid_columns - size;
        Places out;
#pragma unroll
        for (int i = 0; i < each; i++) {
            const int down = row() + i * pass < valid_rows ? row() + i * pass : valid_rows - 1;
            out.bytes[i] = (static_cast<uint32_t>(down) * static_cast<uint32_t>(stride) +
                            static_cast<uint32_t>(column)) *
                           uint32_t{sizeof(T)};
        }
        return out;
    }
    // A copy in parts, for loops that place each between other instructions: fetch() brings chunk i to registers, clear()
    // replaces columns that are not valid by zeros, write() writes chunk i to LDS. `from` is the same in all lanes.
    __device__ void fetch(const void* from, const Places& at, int i) {
        static_assert(rows % pass == 0);
        staged[i] = *reinterpret_cast<const uint4*>(static_cast<const char*>(from) + at.bytes[i]);
    }
    template <class T>
    __device__ void clear(int valid_columns) {
        const bool inside = chunk() * int{16 / sizeof(T)} < valid_columns;
#pragma unroll
        for (int i = 0; i < each; i++)
            if (!inside) staged[i] = make_uint4(0, 0, 0, 0);
    }
    __device__ void write(SharedTile<columns> to, int i) const {
        *reinterpret_cast<uint4*>(to.at(row(), chunk()) + i * pass * chunks * 16) = staged[i];
    }
#endif
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
#pragma unroll
        for (int i = 0; i < each; i++) {
            if (rows % pass != 0 && row() + i * pass >= rows) break;
            *reinterpret_cast<uint4*>(place(i)) = staged[i];
        }
#endif
    }

  private:
#if defined(LLAMAC_CPU)
    SharedTile<columns> shared{};  // gcc warns where it cannot see that begin() comes before end()
#else
    SharedTile<columns> shared;  // with a null, AMD's compiler no longer knows that it is LDS
#endif
#if !defined(LLAMAC_NVIDIA)
    uint4 staged[each];
#endif
    static __device__ int row() { return static_cast<int>(threadIdx.x) / chunks; }
    static __device__ int chunk() { return static_cast<int>(threadIdx.x) % chunks; }
    __device__ char* place(int i) const { return shared.at(shared.offset(row(), chunk()), i * pass, 0); }
};

// The way back: rows of LDS to memory, those below valid_rows, valid_columns (in elements, whole chunks) of each. After
// a __syncthreads.
template <int rows, int columns, int threads, class T>
__device__ void store_tile(T* to, int64_t stride, SharedTile<columns> from, int valid_rows,
                           int valid_columns = columns * 2 / int{sizeof(T)}) {
    constexpr int size = 16 / sizeof(T);
    for (int i = static_cast<int>(threadIdx.x); i < rows * columns / 8; i += threads) {
        const int row = i / (columns / 8), chunk = i % (columns / 8);
        if (row < valid_rows && chunk * size < valid_columns)
            store_vector(reinterpret_cast<uint4*>(to + row * stride + chunk * size),
                         *reinterpret_cast<const uint4*>(from.at(row, chunk)));
    }
}

}  // namespace llamac
