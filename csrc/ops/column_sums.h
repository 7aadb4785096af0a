// Sums of columns, in an order of additions that is the same in every run: for gradients of weights that all rows share.
#pragma once
#include <algorithm>
#include <vector>

#include "core/device.h"

namespace llamac {

// On the host. add(first, last, sums) adds the rows [first, last) to sums[C], zeros at first. Threads take blocks of rows that
// N alone determines, so that the bits do not depend on the threads.
template <class Add>
std::vector<float> column_sums(int64_t N, int64_t C, Add add) {
    const int64_t rows = std::max<int64_t>(32, (N + 63) / 64), blocks = (N + rows - 1) / rows;
    std::vector<float> partial(blocks * C, 0.0f), sums(C, 0.0f);
#pragma omp parallel for
    for (int64_t b = 0; b < blocks; b++) add(b * rows, std::min(N, (b + 1) * rows), &partial[b * C]);
    for (int64_t b = 0; b < blocks; b++)
#pragma omp simd
        for (int64_t c = 0; c < C; c++) sums[c] += partial[b * C + c];
    return sums;
}

// The second kernel where each block of the first has left one row of partial[rows, C]: a block has one column per lane, its
// warps share out the rows.
template <class G>
__device__ void sum_columns(G* out, const float* partial, int rows, int64_t C, bool accumulate) {
    struct Shared {
        float sums[max_warps][warp_size];
    };
    Shared& shared = shared_memory<Shared>();
    const int64_t c = int64_t{blockIdx.x} * warp_size + lane_index();
    constexpr int warps = max_warps;  // columns_grid()'s
    float sum = 0, before = 0;        // before: loaded early, as the kernel waits most of the time
    if (accumulate && warp_index() == 0 && c < C) before = float(out[c]);
    // Rows whose loads are in flight together, the last ones too.
    constexpr int together = 8;
    for (int first = warp_index(); first < rows; first += together * warps) {
        float values[together];
#pragma unroll
        for (int i = 0; i < together; i++) {
            const int row = first + i * warps;
            values[i] = row < rows && c < C ? partial[row * C + c] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < together; i++) sum += values[i];
    }
    shared.sums[warp_index()][lane_index()] = sum;
    __syncthreads();
    if (warp_index() != 0 || c >= C) return;
#pragma unroll
    for (int w = 1; w < warps; w++) sum += shared.sums[w][lane_index()];
    out[c] = G(before + sum);
}
// outputs: sums of as many partial arrays, by blockIdx.y.
inline Grid columns_grid(int64_t C, hipStream_t stream, unsigned outputs = 1) {
    return Grid(dim3(blocks_for(C, device_properties().warp_size), outputs), max_threads_per_block, stream);
}

}  // namespace llamac
