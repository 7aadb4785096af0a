// The gradient of the input where each element is a sum of few products, as of adapters of low rank: variant `narrow` of
// matmul.hip. The time is that of writing dx, and of reading it where it accumulates: at K = 32 the library moves 2.5 TB/s on an H200.
// A block keeps its rows of dout in registers and walks along a part of the columns: the next columns of the weight, and of dx,
// come to LDS while these are multiplied. Results go through LDS, so that neighbouring lanes write 16 bytes of a row each.
#include "core/device.h"
#include "ops/matmul/matmul.h"
#include "platform/tile.h"

namespace llamac {
namespace {

using T = Tile<tile_rows>;
constexpr int max_inner = 64;
// panel: columns at a time, 128 bytes of each row. panels: of a block.
constexpr int block_rows = 128, panel = 64, panels = 4, block_threads = 256;
// Blocks per multiprocessor, for which the compiler has to find registers: one writes while others compute.
constexpr int residents = 3;

// LDS of sums over up to `inner`: rows of dout, then two stages, each of columns of the weight and of dx.
template <int inner>
struct Lds {
    static constexpr int64_t dout_bytes = SharedTile<inner>::bytes(block_rows),
                             weight_bytes = SharedTile<panel>::bytes(inner),
                             dx_bytes = SharedTile<panel>::bytes(block_rows),
                             bytes = dout_bytes + 2 * (weight_bytes + dx_bytes);
    char* data;

    __device__ SharedTile<inner> dout() const { return {data}; }
    __device__ SharedTile<panel> weight(int stage) const {
        return {data + dout_bytes + stage * (weight_bytes + dx_bytes)};
    }
    __device__ SharedTile<panel> dx(int stage) const { return {weight(stage).data + weight_bytes}; }
};

template <class E, int inner>
__global__ void __launch_bounds__(block_threads, residents)
    matmul_backward_input_narrow_kernel(Dependent<E*> dx_, Dependent<const E*> dout_,
                                        Dependent<const E*> weight_, int64_t N, int C, int K,
                                        bool accumulate) {
    const auto [dx, dout, weight] = wait(dx_, dout_, weight_);
    constexpr int warp_rows = block_rows / (block_threads / warp_size), tiles_m = warp_rows / tile_rows;
    constexpr int tiles_n = panel / tile_rows, width = T::width<tiles_n>;
    constexpr int depth = T::depth, parts = inner / 16 / depth;
    const Lds<inner> lds{dynamic_shared_memory()};
    const int across = (C + panels * panel - 1) / (panels * panel);
    const int64_t first_row = int64_t{blockIdx.x / across} * block_rows;
    const int rows = N - first_row < block_rows ? static_cast<int>(N - first_row) : block_rows;
    const int begin = blockIdx.x % across * panels * panel,
              end = begin + panels * panel < C ? begin + panels * panel : C;
    E* const dx_rows = dx + first_row * C;

    TileCopy<block_rows, inner, block_threads> dout_copy;
    TileCopy<inner, panel, block_threads> weight_copy;
    TileCopy<block_rows, panel, block_threads> dx_copy;
    const auto begin_copies = [&](int c, int stage) {
        weight_copy.begin(lds.weight(stage), weight + c, C, K, C - c);
        if (accumulate) dx_copy.begin(lds.dx(stage), dx_rows + c, C, rows, C - c);
    };
    const auto end_copies = [&] {
        weight_copy.end();
        if (accumulate) dx_copy.end();
        __syncthreads();
    };
    dout_copy.begin(lds.dout(), dout + first_row * K, K, rows, K);
    begin_copies(begin, 0);
    dout_copy.end();
    end_copies();
    const int warp_row = warp_index() * warp_rows;
    T::Operand a[tiles_m][parts][depth];
#pragma unroll
    for (int m = 0; m < tiles_m; m++)
#pragma unroll
        for (int part = 0; part < parts; part++)
            T::load_rows<Order::any>(a[m][part], lds.dout(), warp_row + m * tile_rows, part * depth * 16);

    for (int c = begin, stage = 0; c < end; c += panel, stage ^= 1) {
        // The panel before this one, whose place the next one takes, is stored: all have passed the barrier of these copies.
        if (c > begin) end_copies();
        if (c + panel < end) begin_copies(c + panel, stage ^ 1);
        T::Accumulator sums[tiles_m][tiles_n] = {};
#pragma unroll
        for (int part = 0; part < parts; part++) {
            if (part * depth * 16 >= K) break;
#pragma unroll
            for (int d = 0; d < depth; d++)
#pragma unroll
                for (int n = 0; n < tiles_n; n += width) {
                    T::RightOperand b[width];
                    T::load_columns<Order::any, tiles_n>(b, lds.weight(stage), (part * depth + d) * 16, n);
#pragma unroll
                    for (int w = 0; w < width; w++)
#pragma unroll
                        for (int m = 0; m < tiles_m; m++) T::multiply<E>(sums[m][n + w], a[m][part][d], b[w]);
                }
        }
        const SharedTile<panel> out = lds.dx(stage);
#pragma unroll
        for (int m = 0; m < tiles_m; m++) {
            const int row = warp_row + m * tile_rows;
            if (accumulate) {
#pragma unroll
                for (int n = 0; n < tiles_n; n++)
#pragma unroll
                    for (int i = 0; i < T::elements; i++) {
                        const int column = T::interleaved<tiles_n>(n, T::column(i));
                        sums[m][n].x[i] += float(reinterpret_cast<const E*>(
                            out.at(row + T::row(T::slot(i)), column / 8))[column % 8]);
                    }
            }
            T::store_rows<E, tiles_n>(out, row, sums[m]);
        }
        __syncthreads();
        store_tile<block_rows, panel, block_threads>(dx_rows + c, C, out, rows, C - c);
    }
}

}  // namespace

template <class E>
void matmul_backward_input_narrow(View<E, 2> dx, View<const E, 2> dout, View<const E, 2> weight,
                                  bool accumulate, LaunchContext context) {
    const int64_t N = dx.shape[0], C = dx.shape[1], K = dout.shape[1];
    const int64_t blocks = int64_t{blocks_for(N, block_rows)} * blocks_for(C, panels * panel);
    const auto run = [&]<int inner>() {
        launch(Grid(blocks_for(blocks, 1), block_threads, context.stream, Lds<inner>::bytes),
               matmul_backward_input_narrow_kernel<E, inner>, dx.data, dout.data, weight.data, N,
               static_cast<int>(C), static_cast<int>(K), accumulate);
    };
    K <= 32 ? run.template operator()<32>() : run.template operator()<64>();
}

template decltype(matmul_backward_input_narrow<bf16>) matmul_backward_input_narrow<bf16>;
template decltype(matmul_backward_input_narrow<fp16>) matmul_backward_input_narrow<fp16>;

bool narrow_supports(const Call& call) {
    return call["K"] <= max_inner && tiled_supports(call);
}

}  // namespace llamac
