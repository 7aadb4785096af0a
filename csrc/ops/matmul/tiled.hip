// PAGE
#include "core/device.h"
#include "ops/matmul/matmul.h"
#include "platform/tile.h"

namespace llamac {
namespace {

// How an operand [rows of the product, k] lies in memory: k along its rows, or down its columns.
enum class Layout { rows, columns };

// The sizes.
struct Sizes {
    static constexpr int threads = 256, block_m = 256, block_n = 128;
    static constexpr int step = asynchronous_copies ? 64 : 32;   // of k, a tile
    static constexpr int buffers = asynchronous_copies ? 4 : 1;  // of LDS
    static constexpr int sets = asynchronous_copies ? 2 : 1;     // of operands in registers
    static constexpr int ahead = buffers > 1 ? buffers - 1 : 1;  // copies on their way
    static constexpr int strip = asynchronous_copies ? 2 : 1;    // rows of tiles
    static constexpr int pad = asynchronous_copies ? 8 : 4;      // floats
    static constexpr int group = 8;                              // rows of blocks

    static constexpr int R = tile_rows, warps = threads / warp_size;
    static constexpr int warp_n = 64, warps_n = block_n / warp_n;
    static constexpr int warp_m = block_m * block_n / warps / warp_n;
    static constexpr int tiles_m = warp_m / R, tiles_n = warp_n / R;
    using T = Tile<R>;
    static constexpr int depth = T::least_depth, parts = step / 16 / depth;
};
using S = Sizes;
using T = S::T;

// One operand of the product: `extent` rows of it a block, `tiles` tiles of rows a warp.
template <Layout layout, int extent, int tiles>
struct Side {
    static constexpr bool by_rows = layout == Layout::rows;
    static constexpr int lds_rows = by_rows ? extent : S::step, lds_columns = by_rows ? S::step : extent;
    using Shared = SharedTile<lds_columns>;
    using Copy = TileCopy<lds_rows, lds_columns, S::threads>;
    static constexpr int64_t bytes = Shared::bytes(lds_rows);

    // rows, k: where the block's tile begins, of all_rows x all_k.
    static __device__ void begin(Copy& copy, char* to, const bf16* x, int row, int k, int all_rows,
                                 int all_k) {
        if constexpr (by_rows)
            copy.begin(Shared{to}, x + int64_t{row} * all_k + k, all_k, all_rows - row, all_k - k);
        else
            copy.begin(Shared{to}, x + int64_t{k} * all_rows + row, all_rows, all_k - k, all_rows - row);
    }
    static __device__ void load(T::Operand (&out)[tiles][S::depth], const char* from, int row, int k) {
        const Shared shared{const_cast<char*>(from)};
        if constexpr (by_rows) {
#pragma unroll
            for (int t = 0; t < tiles; t++) T::load_rows<Order::any>(out[t], shared, row + t * S::R, k);
        } else {
            constexpr int width = T::width<tiles>;
#pragma unroll
            for (int d = 0; d < S::depth; d++)
#pragma unroll
                for (int t = 0; t < tiles; t += width) {
                    T::Operand loaded[width];
                    T::load_columns<Order::any, tiles>(loaded, shared, k + 16 * d, t, row);
#pragma unroll
                    for (int w = 0; w < width; w++) out[t + w][d] = loaded[w];
                }
        }
    }
    // The row of the warp's that row `c` of tile `t` is.
    static __device__ int place(int t, int c) { return by_rows ? t * S::R + c : T::spread<tiles>(t, c); }
};

template <Layout a_layout, Layout b_layout>
struct Product {
    using A = Side<a_layout, S::block_m, S::tiles_m>;
    using B = Side<b_layout, S::block_n, S::tiles_n>;
    struct Operands {
        T::Operand a[S::tiles_m][S::depth], b[S::tiles_n][S::depth];
    };
    static constexpr int64_t buffer_bytes = A::bytes + B::bytes;
    static constexpr int strip_row = S::warp_n + S::pad, strip_floats = S::strip * S::R * strip_row;
    // Of all LDS; 4 waves of 64 or 8 of 32 have ...
    static constexpr int64_t strips_bytes = int64_t{S::warps} * strip_floats * 4;
    static constexpr int64_t shared_bytes =
        S::buffers * buffer_bytes > strips_bytes ? S::buffers * buffer_bytes : strips_bytes;
};

struct Sums {
    T::Accumulator tile[S::tiles_m][S::tiles_n];
};

template <class P>
__device__ void load(typename P::Operands& out, const char* buffer, int m, int n, int part) {
    P::A::load(out.a, buffer, m, part * S::depth * 16);
    P::B::load(out.b, buffer + P::A::bytes, n, part * S::depth * 16);
}
template <class P>
__device__ void multiply(Sums& sums, const typename P::Operands& x) {
#pragma unroll
    for (int d = 0; d < S::depth; d++)
#pragma unroll
        for (int m = 0; m < S::tiles_m; m++)
#pragma unroll
            for (int n = 0; n < S::tiles_n; n++) T::multiply(sums.tile[m][n], x.a[m][d], x.b[n][d]);
}

struct Block {
    int m, n;
};
__device__ Block block_of(int rows, int columns) {
    int i = static_cast<int>(blockIdx.x);
    if constexpr (dies > 1) {
        const int all = static_cast<int>(gridDim.x), die = i % dies, share = all / dies, more = all % dies;
        i = die * share + (die < more ? die : more) + i / dies;
    }
    const int first = i / (S::group * columns) * S::group;
    const int height = rows - first < S::group ? rows - first : S::group;
    i %= S::group * columns;
    return {(first + i % height) * S::block_m, i / height * S::block_n};
}

// out = sums (+ initial), a strip of each warp's rows after another through its own piece of LDS.
template <class P, class O>
__device__ void store(O* out, const O* initial, const Sums& sums, int first_m, int first_n, int M, int N) {
    constexpr int size = vector_size<O>, lanes = S::warp_n / size, rows = warp_size / lanes;
    constexpr int vectors = S::strip * S::R / rows;
    float* strip = reinterpret_cast<float*>(dynamic_shared_memory()) + warp_index() * P::strip_floats;
    const int n = first_n + lane_index() % lanes * size;
#pragma unroll
    for (int t0 = 0; t0 < S::tiles_m; t0 += S::strip) {
        __syncthreads();  // nobody reads operands, or the strip before this one, any more
#pragma unroll
        for (int t = 0; t < S::strip; t++)
#pragma unroll
            for (int u = 0; u < S::tiles_n; u++)
#pragma unroll
                for (int i = 0; i < T::elements; i++)
                    strip[(t * S::R + T::row(T::slot(i))) * P::strip_row + P::B::place(u, T::column(i))] =
                        sums.tile[t0 + t][u].x[i];
        int64_t at[vectors];
        uint4 old[vectors] = {};
#pragma unroll
        for (int v = 0; v < vectors; v++) {
            const int row = v * rows + lane_index() / lanes;
            const int m = first_m + P::A::place(t0 + row / S::R, row % S::R);
            at[v] = m < M && n < N ? int64_t{m} * N + n : -1;
            if (initial && at[v] >= 0) old[v] = load128(initial + at[v]);
        }
        __syncthreads();
#pragma unroll
        for (int v = 0; v < vectors; v++) {
            const float* row = strip + (v * rows + lane_index() / lanes) * P::strip_row + n - first_n;
            float x[size], sum[size];
            unpack(old[v], x);
#pragma unroll
            for (int i = 0; i < size; i += 4) {
                float four[4];
                unpack(load128(row + i), four);
                for (int j = 0; j < 4; j++) sum[i + j] = x[i + j] + four[j];
            }
            if (at[v] >= 0) store128(out + at[v], pack(sum));
        }
    }
}

// out[m][n] = sum_k a[m][k] b[n][k] (+ initial[m][n])
template <class P, class O>
__global__ void __launch_bounds__(S::threads)
    matmul_kernel2(O* out, const O* initial, const bf16* a, const bf16* b, int M, int N, int K) {
    const Block block = block_of((M + S::block_m - 1) / S::block_m, (N + S::block_n - 1) / S::block_n);
    const int warp_m = warp_index() / S::warps_n * S::warp_m, warp_n = warp_index() % S::warps_n * S::warp_n;
    const int tiles = (K + S::step - 1) / S::step;
    char* const shared = dynamic_shared_memory();
    typename P::A::Copy copy_a[S::ahead];
    typename P::B::Copy copy_b[S::ahead];

    const auto begin = [&](int tile) {
        char* to = shared + tile % S::buffers * P::buffer_bytes;
        auto& copy = copy_b[tile % S::ahead];
        if (tile < tiles) {
            P::A::begin(copy_a[tile % S::ahead], to, a, block.m, tile * S::step, M, K);
            P::B::begin(copy, to + P::A::bytes, b, block.n, tile * S::step, N, K);
        } else {
            copy_a[tile % S::ahead].begin_none();
            copy.begin_none();
        }
    };
    const auto arrive = [&](int tile) {
        if (S::buffers == 1) __syncthreads();
        copy_a[tile % S::ahead].template end<2 * S::ahead - 2>();
        copy_b[tile % S::ahead].template end<2 * S::ahead - 2>();
        __syncthreads();
    };

    Sums sums = {};
    typename P::Operands operands[S::sets];
#pragma unroll
    for (int tile = 0; tile < S::ahead; tile++) begin(tile);
    if constexpr (S::sets == 1) {
        for (int tile = 0; tile < tiles; tile++) {
            arrive(tile);
            begin(tile + S::ahead);
            keep_order();
#pragma unroll
            for (int part = 0; part < S::parts; part++) {
                load<P>(operands[0], shared + tile % S::buffers * P::buffer_bytes, warp_m, warp_n, part);
                multiply<P>(sums, operands[0]);
            }
        }
    } else {
        arrive(0);
        load<P>(operands[0], shared, warp_m, warp_n, 0);
        for (int tile = 0; tile < tiles; tile++) {
#pragma unroll
            for (int part = 0; part < S::parts; part++) {
                const bool last = part == S::parts - 1;
                if (last) arrive(tile + 1);
                load<P>(operands[(part + 1) % 2], shared + (tile + last) % S::buffers * P::buffer_bytes,
                        warp_m, warp_n, last ? 0 : part + 1);
                if (part == 0) begin(tile + S::ahead);
                multiply<P>(sums, operands[part % 2]);
            }
        }
    }
    store<P>(out, initial, sums, block.m + warp_m, block.n + warp_n, M, N);
}

template <Layout a_layout, Layout b_layout, class O>
void matmul_2(O* out, const O* initial, const bf16* a, const bf16* b, int64_t M, int64_t N, int64_t K,
              const Device& device) {
    using P = Product<a_layout, b_layout>;
    const unsigned blocks = blocks_for(blocks_for(M, S::block_m) * int64_t{blocks_for(N, S::block_n)}, 1);
    launch(Grid(blocks, S::threads, device.stream, P::shared_bytes), matmul_kernel2<P, O>, out, initial, a, b,
           M, N, K);
}

}  // namespace

void matmul_forward_2(View<bf16, 2> out, View<const bf16, 2> x, View<const bf16, 2> weight,
                      View<const bf16, 2> residual, Device device) {
    matmul_2<Layout::rows, Layout::rows, bf16>(out.data, residual.data, x.data, weight.data, x.shape[0],
                                               weight.shape[0], x.shape[1], device);
}

void matmul_backward_input_2(View<bf16, 2> dx, View<const bf16, 2> dout, View<const bf16, 2> weight,
                             Device device) {
    matmul_2<Layout::rows, Layout::columns, bf16>(dx.data, nullptr, dout.data, weight.data, dx.shape[0],
                                                  dx.shape[1], dout.shape[1], device);
}

template <class G>
void matmul_backward_weight_2(View<G, 2> dweight, View<const bf16, 2> dout, View<const bf16, 2> x,
                              bool accumulate, Device device) {
    matmul_2<Layout::columns, Layout::columns, G>(dweight.data, accumulate ? dweight.data : nullptr,
                                                  dout.data, x.data, dweight.shape[0], dweight.shape[1],
                                                  x.shape[0], device);
}
template decltype(matmul_backward_weight_2<float>) matmul_backward_weight_2<float>;
template decltype(matmul_backward_weight_2<bf16>) matmul_backward_weight_2<bf16>;

bool tiled_supports(const Call& call) {
    bool whole = call["C"] % 8 == 0 && call["K"] % 8 == 0;
    for (size_t i = 0; i < call.op->operands.size(); i++)
        whole &= reinterpret_cast<uintptr_t>(call.tensor[i].data) % 16 == 0;
    for (const char* dimension : {"N", "C", "K"}) whole &= call[dimension] <= 1 << 30;
    return whole;
}

}  // namespace llamac
