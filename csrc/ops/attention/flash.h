// What the tiled kernels of attention share: their sizes an architecture, their order of blocks, rows of
// operands.
#pragma once
#include "core/device.h"
#include "platform/tile.h"

namespace llamac {

constexpr float log2_e = 1.44269504088896341f, ln_2 = 0.693147180559945309f;

// Threads of a block of `warps`; where the host asks, of the device that is there.
__host__ __device__ constexpr int threads_of(int warps) {
    return warps * warp_size;
}
inline int host_threads_of(int warps) {
    return warps * device_properties().warp_size;
}

// A piece of the grid: which rows of which head. Rows further down have more keys before them, so they come
// first: the last blocks to run are short. Neighbouring blocks share keys and values; where blocks are dealt
// out to dies in turn, each with a cache of its own, a die gets neighbours.
struct Piece {
    int64_t batch, head, block;
};
__device__ inline Piece piece_of(int64_t blocks, int64_t heads, bool last_first) {
    int64_t i = blockIdx.x;
    const int64_t pieces = gridDim.x;
    if (pieces % dies == 0) i = i % dies * (pieces / dies) + i / dies;
    const int64_t block = i % blocks;
    return {i / blocks / heads, i / blocks % heads, last_first ? blocks - 1 - block : block};
}

// The first element of a head's row.
template <class T>
__device__ T* row_of(const View<T, 4>& x, int64_t batch, int64_t row, int64_t head) {
    return x.data + batch * x.stride[0] + row * x.stride[1] + head * x.stride[2];
}

}  // namespace llamac
