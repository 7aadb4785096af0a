// How a GEMM is tiled: the variant `tiled` of matmul (tiled.hip), one kernel for the three products of training, and of
// scaled_matmul (scaled_tiled.hip).
//
//   out[m][n] = sum_k a[m][k] b[n][k]  (* scale) (+ initial[m][n])
//
//                     out      a                 b                   initial
//   forward           out      x, along k        weight, along k     residual
//   backward_input    dx       dout, along k     weight, down k
//   backward_weight   dweight  dout, down k      x, down k           dweight
//
// "Along": neighbors in memory are neighbors in k; "down": they are neighbors in m or n.
//
// Every number of a is needed for N results, every one of b for M. Fetched from memory each time, they would
// take two bytes a FLOP, and a GPU has 200 times as many FLOP/s as bytes/s. So each level of memory hands
// down tiles that the next level uses many times. A tile of m x n results takes, for each k, m + n numbers
// of two bytes and gives 2 m n FLOP: m n / (m + n) FLOP a byte, the more the larger and the squarer it is.
// The room for sums and operands limits m and n. On an H200 (132 SMs, 440 TFLOP/s with this kernel):
//
//   from     to          tile of       m x n         FLOP a byte   it takes     there are
//   memory   L2          all blocks    2048 x 2112   1040          0.4 TB/s     4.8 TB/s
//   L2       LDS         a block       128 x 256     85            5.2 TB/s     about 7 TB/s
//   LDS      registers   a warp        64 x 64       32            13.8 TB/s    33 TB/s
//
// - All blocks that run at a time: `group` rows of blocks, so that they are a square of the result and not a
//   stripe (block_tile_of). If the device has several XCDs with a cache each, every XCD has its own square.
// - A block walks over k in steps; a tile of a and one of b, `step` deep, come to LDS while it multiplies
//   those before them (Copies). Chunks of a tile change places, so that neither copies nor loads meet in a
//   bank (SharedTile).
// - A warp keeps its sums, 64 x 64 fp32 or 128 registers a lane, from the first k to the last: half of all
//   that it has. It loads 16 or 32 of k of its operands at a time from LDS; then each of its tiles of a is
//   multiplied with each of its tiles of b on the matrix cores (load, multiply).
// - At the end the sums go through LDS once more, so that memory is written 128 bytes of a row at a time or
//   more; the addition is in fp32, and rounding happens once (store).
//
// Operands are bf16, fp16 or fp8. Two neighbors of fp8 along k take the place of one bf16 everywhere but in the instruction
// that multiplies, so sizes and places of k are those of bf16: `step` is 32 or 64 bf16, or twice as many fp8.
//
// The sums of an element are added in one order, whatever the grid: results are the same in every run.
#pragma once
#include "core/device.h"
#include "platform/tile.h"

namespace llamac::tiled {

// How a warp's operands come from LDS. load_first: then they are multiplied. two_sets: the next are loaded while these are
// multiplied. in_place: the same with one set, whose parts are replaced as soon as they are multiplied; of operands along k
// (others: load_first).
enum class Schedule { load_first, two_sets, in_place };

// Sizes by matrix instruction. block_tile, warp_tile: of the result. step: of k. stages: of the pipeline in LDS, each
// for a tile of both operands. epilogue_tiles: rows of tiles of a warp that go through LDS at a time, at the end. pad: floats
// between its rows, so that lanes that store down a column (four rows of 32 bytes, or eight of 16) meet in no
// bank.
template <class Machine>
struct MatmulSizes;

// One block of 8 warps an SM: 255 registers a lane are all there are. 4 stages of 48 KiB: three
// tiles are in flight. A longer step means fewer barriers: 64 is 7% faster than 32.
template <>
struct MatmulSizes<MmaSync> {
    static constexpr int block_tile_m = 128, block_tile_n = 256, warp_tile_m = 64, warp_tile_n = 64;
    static constexpr int step = 64, stages = 4, epilogue_tiles = 2, pad = 8;
    static constexpr Schedule schedule = Schedule::two_sets;
};

// Two blocks of 4 waves a CU, which wait for memory and barriers at different times: 256 registers a lane, 32
// KiB of LDS a block; the last blocks of a grid that is no multiple of them have a CU for themselves. A wave of 64 lanes
// holds 128 x 64 sums in 128 registers, operands in 48. The next tile waits in 24 registers, so one stage of 24 KiB
// will do: it is written when all waves have read it.
template <>
struct MatmulSizes<Mfma> {
    static constexpr int block_tile_m = 256, block_tile_n = 128, warp_tile_m = 128, warp_tile_n = 64;
    static constexpr int step = 32, stages = 1, epilogue_tiles = 1, pad = 4;
    static constexpr Schedule schedule = Schedule::in_place;
};

// Operands stand in both halves of a wave of 32 and take twice the registers, so sums get 64.
template <>
struct MatmulSizes<Wmma> {
    static constexpr int block_tile_m = 128, block_tile_n = 128, warp_tile_m = 64, warp_tile_n = 32;
    static constexpr int step = 32, stages = 2, epilogue_tiles = 1, pad = 4;
    static constexpr Schedule schedule = Schedule::load_first;
};

// Derived sizes of a launch.
template <class M>
struct Sizes : MatmulSizes<M> {
    using Given = MatmulSizes<M>;
    static constexpr int warps_m = Given::block_tile_m / Given::warp_tile_m,
                         warps_n = Given::block_tile_n / Given::warp_tile_n;
    static constexpr int threads = warps_m * warps_n * M::warp;
    static constexpr int in_flight = Given::stages > 1 ? Given::stages - 1 : 1;  // tiles on their way
    static constexpr int group = 2048 / Given::block_tile_m;  // rows of blocks, see block_tile_of
    // LDS: the stages; in their place, when the last is read, an epilogue tile for each warp.
    static constexpr int a_bytes = Given::block_tile_m * Given::step * 2,
                         b_bytes = Given::block_tile_n * Given::step * 2;
    static constexpr int stage_bytes = a_bytes + b_bytes, stages_bytes = Given::stages * stage_bytes;
    static constexpr int epilogue_row = Given::warp_tile_n + Given::pad;
    static constexpr int epilogue_tile_bytes = Given::epilogue_tiles * tile_rows * epilogue_row * 4;
    static constexpr int epilogue_bytes = warps_m * warps_n * epilogue_tile_bytes;
    static constexpr int shared_bytes = stages_bytes > epilogue_bytes ? stages_bytes : epilogue_bytes;
};

// And for the kernel. parts: of a step, each `depth` operands deep.
using T = Tile;
struct S : Sizes<Machine> {
    static constexpr int R = tile_rows, tiles_m = warp_tile_m / R, tiles_n = warp_tile_n / R;
    static constexpr int depth = T::depth, parts = step / 16 / depth;
    static_assert(schedule == Schedule::two_sets ? parts % 2 == 0 : in_flight == 1);
};

// How an operand, of m or n rows, lies in memory.
enum class Layout { along_k, down_k };

// One operand of the product: `extent` rows a block, `tiles` tiles of rows a warp. A tile lies in LDS as it
// does in memory; operands down k are turned on their way to registers (load_columns).
template <class Element, class Operand, Layout layout, int extent, int tiles>
struct OperandLoader {
    static constexpr bool along = layout == Layout::along_k;
    static_assert(along || sizeof(Element) == 2);  // load_columns turns 16 bits
    static constexpr int lds_rows = along ? extent : S::step, lds_columns = along ? S::step : extent;
    using Shared = SharedTile<lds_columns>;
    using Copy = TileCopy<lds_rows, lds_columns, S::threads>;

    // The tile whose first number is at (row, k) of the operand; zeros beyond its edges.
    static __device__ void begin(Copy& copy, char* to, const Element* x, int row, int k, int rows, int K) {
        if constexpr (along)
            copy.begin(Shared{to}, x + int64_t{row} * K + k, K, rows - row, K - k);
        else
            copy.begin(Shared{to}, x + int64_t{k} * rows + row, rows, K - k, rows - row);
    }
    // A warp's operands: rows from `row` on, k from `k` on.
    static __device__ void load(Operand (&out)[tiles][S::depth], const char* from, int row, int k) {
        const Shared shared{const_cast<char*>(from)};
        if constexpr (along) {
#pragma unroll
            for (int t = 0; t < tiles; t++) T::load_rows(out[t], shared, row + t * S::R, k);
        } else {
            constexpr int width = T::width<tiles>;
#pragma unroll
            for (int d = 0; d < S::depth; d++)
#pragma unroll
                for (int t = 0; t < tiles; t += width) {
                    Operand loaded[width];
                    T::load_columns<Order::any, tiles>(loaded, shared, k + 16 * d, t, row);
#pragma unroll
                    for (int w = 0; w < width; w++) out[t + w][d] = loaded[w];
                }
        }
    }
    // Rows of tile `t` of a warp, all of k; along k.
    static __device__ void load_tile(Operand (&out)[S::depth], const char* from, int row, int t) {
        T::load_rows(out, Shared{const_cast<char*>(from)}, row + t * S::R, 0);
    }
    // Which of the warp's rows row `i` of tile `t` is.
    static __device__ int place(int t, int i) { return along ? t * S::R + i : T::interleaved<tiles>(t, i); }
};

template <Layout a_layout, Layout b_layout, class X, class Y>
struct Product {
    using ElementA = X;
    using ElementB = Y;
    static_assert(sizeof(X) == sizeof(Y));
    static constexpr int step = S::step * 2 / int{sizeof(X)};  // elements
    using A = OperandLoader<X, T::Operand, a_layout, S::block_tile_m, S::tiles_m>;
    using B = OperandLoader<Y, T::RightOperand, b_layout, S::block_tile_n, S::tiles_n>;
    struct Operands {
        T::Operand a[S::tiles_m][S::depth];
        T::RightOperand b[S::tiles_n][S::depth];
    };
    static __device__ void multiply(T::Accumulator& c, const T::Operand& a, const T::RightOperand& b) {
        if constexpr (sizeof(X) == 1)
            T::template multiply_fp8<X, Y>(c, a, b);
        else
            T::multiply<X>(c, a, b);
    }
};

struct Sums {
    T::Accumulator tile[S::tiles_m][S::tiles_n];
};

template <class P>
__device__ void load(typename P::Operands& out, const char* stage, int warp_m, int warp_n, int part) {
    P::A::load(out.a, stage, warp_m, part * S::depth * 16);
    P::B::load(out.b, stage + S::a_bytes, warp_n, part * S::depth * 16);
}
template <class P>
__device__ void multiply(Sums& sums, const typename P::Operands& x) {
#pragma unroll
    for (int d = 0; d < S::depth; d++)
#pragma unroll
        for (int m = 0; m < S::tiles_m; m++)
#pragma unroll
            for (int n = 0; n < S::tiles_n; n++) P::multiply(sums.tile[m][n], x.a[m][d], x.b[n][d]);
}

// A block's tiles on their way to LDS, S::in_flight of them at a time.
template <class P>
struct Copies {
    const typename P::ElementA* a;
    const typename P::ElementB* b;
    int m, n;  // the block's first row of a, of b
    int M, N, K;
    char* shared;
    typename P::A::Copy copy_a[S::in_flight];
    typename P::B::Copy copy_b[S::in_flight];

    __device__ int tiles() const { return (K + P::step - 1) / P::step; }
    __device__ char* stage(int tile) const { return shared + tile % S::stages * S::stage_bytes; }
    __device__ void begin(int tile) {
        if (tile < tiles()) {
            P::A::begin(copy_a[tile % S::in_flight], stage(tile), a, m, tile * P::step, M, K);
            P::B::begin(copy_b[tile % S::in_flight], stage(tile) + S::a_bytes, b, n, tile * P::step, N, K);
        } else if (S::in_flight > 1) {  // arrive() counts copies
            copy_a[tile % S::in_flight].begin_none();
            copy_b[tile % S::in_flight].begin_none();
        }
    }
    // Afterwards the tile may be read, and the one before it overwritten.
    __device__ void arrive(int tile) {
        if (S::stages == 1) __syncthreads();  // it comes in the place of the one before
        constexpr int later = 2 * (S::in_flight - 1);
        copy_a[tile % S::in_flight].template end<later>();
        copy_b[tile % S::in_flight].template end<later>();
        __syncthreads();
    }
};

// Loaded, then multiplied: meanwhile the other block's waves multiply.
template <class P>
__device__ void add_tiles(Sums& sums, Copies<P>& copies, int warp_m, int warp_n) {
    typename P::Operands operands;
    copies.begin(0);
    for (int tile = 0; tile < copies.tiles(); tile++) {
        copies.arrive(tile);
        copies.begin(tile + 1);
        scheduling_barrier();  // or the compiler loads from memory when the numbers are needed, not before
#pragma unroll
        for (int part = 0; part < S::parts; part++) {
            load<P>(operands, copies.stage(tile), warp_m, warp_n, part);
            multiply<P>(sums, operands);
        }
    }
}

// The next part's operands are loaded while this one's are multiplied. The next part of the last is the next
// tile's first, so the next tile has to be there one part early.
template <class P>
__device__ void add_tiles_pipelined(Sums& sums, Copies<P>& copies, int warp_m, int warp_n) {
    typename P::Operands operands[2];
#pragma unroll
    for (int tile = 0; tile < S::in_flight; tile++) copies.begin(tile);
    copies.arrive(0);
    load<P>(operands[0], copies.stage(0), warp_m, warp_n, 0);
    for (int tile = 0; tile < copies.tiles(); tile++) {
#pragma unroll
        for (int part = 0; part < S::parts; part++) {
            const bool last = part == S::parts - 1;
            if (last) copies.arrive(tile + 1);
            load<P>(operands[(part + 1) % 2], copies.stage(tile + last), warp_m, warp_n, last ? 0 : part + 1);
            // In the place of the tile before this one: its last part was loaded before this one's arrival.
            if (part == 0) copies.begin(tile + S::in_flight);
            multiply<P>(sums, operands[part % 2]);
        }
    }
}

// A block's next tile on its way to LDS through registers, in pieces that fit between products. As long as whole steps are
// left, the places are the same for each tile, and nothing is compared.
template <class P>
struct Pieces {
    using CopyA = typename P::A::Copy;
    using CopyB = typename P::B::Copy;
    static constexpr int pieces_a = CopyA::each, pieces = pieces_a + CopyB::each;
    const typename P::ElementA* a;  // the block's first row
    const typename P::ElementB* b;
    int rows_a, rows_b, K;  // rows from there on
    char* stage;
    typename CopyA::Places at_a;
    typename CopyB::Places at_b;
    CopyA copy_a;
    CopyB copy_b;

    __device__ explicit Pieces(const Copies<P>& of)
        : a(of.a + int64_t{of.m} * of.K),
          b(of.b + int64_t{of.n} * of.K),
          rows_a(of.M - of.m),
          rows_b(of.N - of.n),
          K(of.K),
          stage(of.stage(0)),
          at_a(CopyA::template places<typename P::ElementA>(K, rows_a, P::step)),
          at_b(CopyB::template places<typename P::ElementB>(K, rows_b, P::step)) {}

    // The optimization barrier: added to `from`, each place would be an address of 64 bits that every step computes.
    __device__ void fetch_whole(int tile, int i) {
        if (i < pieces_a) {
            at_a.bytes[i] = optimization_barrier(at_a.bytes[i]);
            copy_a.fetch(a + tile * P::step, at_a, i);
        } else {
            at_b.bytes[i - pieces_a] = optimization_barrier(at_b.bytes[i - pieces_a]);
            copy_b.fetch(b + tile * P::step, at_b, i - pieces_a);
        }
    }
    // All pieces of a tile, zeros beyond K; nothing of a tile beyond the last.
    __device__ void fetch(int tile) {
        const int left = K - tile * P::step;
        if (left >= P::step) {
#pragma unroll
            for (int i = 0; i < pieces; i++) fetch_whole(tile, i);
        } else if (left > 0) {
            const auto last_a = CopyA::template places<typename P::ElementA>(K, rows_a, left);
            const auto last_b = CopyB::template places<typename P::ElementB>(K, rows_b, left);
#pragma unroll
            for (int i = 0; i < CopyA::each; i++) copy_a.fetch(a + tile * P::step, last_a, i);
#pragma unroll
            for (int i = 0; i < CopyB::each; i++) copy_b.fetch(b + tile * P::step, last_b, i);
            copy_a.template clear<typename P::ElementA>(left);
            copy_b.template clear<typename P::ElementB>(left);
        }
    }
    __device__ void write(int i) const {
        if (i < pieces_a)
            copy_a.write({stage}, i);
        else
            copy_b.write({stage + S::a_bytes}, i - pieces_a);
    }
};

// The products of half of the warp's rows of tiles with column n of tiles. beside(i) follows product i and is done meanwhile.
template <class P, int half, class F>
__device__ void multiply_beside(Sums& sums, const typename P::Operands& x, int n, F beside) {
    constexpr int tiles = S::tiles_m / 2;
#pragma unroll
    for (int i = 0; i < tiles * S::depth; i++) {
        const int m = half * tiles + i % tiles, d = i / tiles;
        P::multiply(sums.tile[m][n], x.a[m][d], x.b[n][d]);
        scheduling_barrier();
        beside(i);
        scheduling_barrier();
    }
}

// A step of Schedule::in_place. Operands come in the place of those that are no longer needed, and there is one stage in LDS.
// With 8 x 4 tiles:
//
//   products         beside them
//   a 0-3 with b 0   a 4-7 of this tile come from LDS
//   a 0-3 with b 1
//   barrier: all warps have read the tile
//   a 0-3 with b 2   the next tile is written to LDS
//   a 0-3 with b 3   the one after it is fetched from memory
//   barrier: the next tile is there
//   a 4-7 with b 0   a 0-3 of the next tile come from LDS, then its b 0
//   a 4-7 with b 1   b 1, and so on
template <class P, class F>
__device__ void add_tile_in_place(Sums& sums, typename P::Operands& x, const Pieces<P>& pieces, int warp_m,
                                  int warp_n, F fetch) {
    constexpr int half = S::tiles_m / 2, products = half * S::depth;
    static_assert(S::tiles_n == 4 && S::parts == 1 && Pieces<P>::pieces <= products);
    multiply_beside<P, 0>(sums, x, 0, [&](int i) {
        if (i < half) P::A::load_tile(x.a[half + i], pieces.stage, warp_m, half + i);
    });
    multiply_beside<P, 0>(sums, x, 1, [](int) {});
    sync_shared();
    scheduling_barrier();
    multiply_beside<P, 0>(sums, x, 2, [&](int i) {
        if (i < Pieces<P>::pieces) pieces.write(i);
    });
    multiply_beside<P, 0>(sums, x, 3, fetch);
    sync_shared();
    scheduling_barrier();
#pragma unroll
    for (int n = 0; n < S::tiles_n; n++)
        multiply_beside<P, 1>(sums, x, n, [&](int i) {
            if (n == 0 && i < half) P::A::load_tile(x.a[i], pieces.stage, warp_m, i);
            if (i == products - 1) P::B::load_tile(x.b[n], pieces.stage + S::a_bytes, warp_n, n);
        });
}

template <class P>
__device__ void add_tiles_in_place(Sums& sums, const Copies<P>& copies, int warp_m, int warp_n) {
    typename P::Operands x;
    Pieces<P> pieces(copies);
    pieces.fetch(0);
#pragma unroll
    for (int i = 0; i < Pieces<P>::pieces; i++) pieces.write(i);
    pieces.fetch(1);
    sync_shared();
#pragma unroll
    for (int t = 0; t < S::tiles_m / 2; t++) P::A::load_tile(x.a[t], pieces.stage, warp_m, t);
#pragma unroll
    for (int t = 0; t < S::tiles_n; t++) P::B::load_tile(x.b[t], pieces.stage + S::a_bytes, warp_n, t);
    // Scalar loads have LDS's counter. With one on its way into the loop, each step would wait for all that it counts.
    __syncthreads();
    const int whole = copies.K / P::step;
    int tile = 0;
    for (; tile + 2 < whole; tile++)
        add_tile_in_place<P>(sums, x, pieces, warp_m, warp_n, [&](int i) {
            if (i < Pieces<P>::pieces) pieces.fetch_whole(tile + 2, i);
        });
    for (; tile < copies.tiles(); tile++)
        add_tile_in_place<P>(sums, x, pieces, warp_m, warp_n, [&](int i) {
            if (i == 0) pieces.fetch(tile + 2);
        });
}

// How sums become results: a lane stores `size` neighboring columns of each row that it stores. columns<size>(n) is what it
// keeps of them; row(m) is loaded ahead, once per row; that of columns makes a result of a sum.
struct NoScale {
    template <int>
    struct Columns {
        __device__ float operator()(float sum, float, int) const { return sum; }
    };
    template <int size>
    __device__ Columns<size> columns(int) const {
        return {};
    }
    __device__ float row(int) const { return 0; }
};

// out[m][n] = scale(sums[m][n], m, n) (+ initial[m][n]). A lane holds parts of rows; through LDS, an epilogue tile at a time,
// neighboring lanes get neighboring 16 bytes of a row. A thread reads `initial` where it writes `out`: they may be the same.
// whole: no row or column is beyond M or N, so that no store is masked: the compiler then knows how many are on their way.
template <class P, bool whole, class O, class Scale>
__device__ void store(O* out, const O* initial, const Scale& scale, const Sums& sums, int first_m,
                      int first_n, int M, int N) {
    constexpr int size = vector_size<O>, lanes = S::warp_tile_n / size, rows = warp_size / lanes;
    constexpr int vectors = S::epilogue_tiles * S::R / rows;
    constexpr int sets =
        S::schedule == Schedule::in_place ? 2 : 1;  // of `initial`: one is on its way while one is added
    float* epilogue =
        reinterpret_cast<float*>(dynamic_shared_memory() + warp_index() * S::epilogue_tile_bytes);
    const int n = first_n + lane_index() % lanes * size;
    const auto columns = scale.template columns<size>(n);
    const auto row_of = [&](int t0, int v) {
        const int row = v * rows + lane_index() / lanes;
        return first_m + P::A::place(t0 + row / S::R, row % S::R);
    };
    const auto inside = [&](int t0, int v) { return whole || (row_of(t0, v) < M && n < N); };
    uint4 old[sets][vectors] = {};
    float row_scale[sets][vectors];
    const auto load = [&](int t0) {
        const int set = t0 / S::epilogue_tiles % sets;
#pragma unroll
        for (int v = 0; v < vectors; v++) row_scale[set][v] = scale.row(row_of(t0, v));
        if (initial) {
#pragma unroll
            for (int v = 0; v < vectors; v++)
                if (inside(t0, v)) old[set][v] = load128(initial + int64_t{row_of(t0, v)} * N + n);
        }
    };
    if (sets == 2) load(0);
#pragma unroll
    for (int t0 = 0; t0 < S::tiles_m; t0 += S::epilogue_tiles) {
        const int set = t0 / S::epilogue_tiles % sets, next = t0 + (sets - 1) * S::epilogue_tiles;
        sync_shared();  // operands and the epilogue tile before this one are read
#pragma unroll
        for (int t = 0; t < S::epilogue_tiles; t++)
#pragma unroll
            for (int u = 0; u < S::tiles_n; u++)
#pragma unroll
                for (int i = 0; i < T::elements; i++)
                    epilogue[(t * S::R + T::row(T::slot(i))) * S::epilogue_row +
                             P::B::place(u, T::column(i))] = sums.tile[t0 + t][u].x[i];
        if (next < S::tiles_m) load(next);
        sync_shared();
#pragma unroll
        for (int v = 0; v < vectors; v++) {
            const float* row = epilogue + (v * rows + lane_index() / lanes) * S::epilogue_row + n - first_n;
            float x[size], sum[size];
            unpack<O>(old[set][v], x);
#pragma unroll
            for (int i = 0; i < size; i += 4) {
                float four[4];
                unpack<float>(load128(row + i), four);
                for (int j = 0; j < 4; j++)
                    sum[i + j] = x[i + j] + columns(four[j], row_scale[set][v], i + j);
            }
            if (inside(t0, v)) store128(out + int64_t{row_of(t0, v)} * N + n, pack<O>(sum));
        }
    }
}

// Which block tile of the result is this block's: `group` rows of blocks, column by column, then the next rows.
// Blocks are distributed to XCDs in turn; an XCD gets neighbors.
struct BlockTile {
    int m, n;
};
inline __device__ BlockTile block_tile_of(int rows, int columns) {
    const int all = static_cast<int>(gridDim.x), xcd = static_cast<int>(blockIdx.x) % xcds;
    const int share = all / xcds, more = all % xcds;  // the first `more` XCDs have one block more
    int i = xcd * share + (xcd < more ? xcd : more) + static_cast<int>(blockIdx.x) / xcds;
    const int first = i / (S::group * columns) * S::group;
    const int height = rows - first < S::group ? rows - first : S::group;
    i %= S::group * columns;
    return {(first + i % height) * S::block_tile_m, i / height * S::block_tile_n};
}

// The block's part of out = scale()(a b', m, n) (+ initial); scale() is called once the sums are there.
template <class P, class O, class Scale>
__device__ __forceinline__ void multiply_block(O* out, const O* initial, const typename P::ElementA* a,
                                               const typename P::ElementB* b, int M, int N, int K,
                                               Scale scale) {
    const BlockTile block = block_tile_of((M + S::block_tile_m - 1) / S::block_tile_m,
                                          (N + S::block_tile_n - 1) / S::block_tile_n);
    const int warp_m = warp_index() / S::warps_n * S::warp_tile_m,
              warp_n = warp_index() % S::warps_n * S::warp_tile_n;
    Copies<P> copies{a, b, block.m, block.n, M, N, K, dynamic_shared_memory(), {}, {}};
    Sums sums = {};
    if constexpr (S::schedule == Schedule::two_sets)
        add_tiles_pipelined<P>(sums, copies, warp_m, warp_n);
    else if constexpr (S::schedule == Schedule::in_place && P::A::along && P::B::along)
        add_tiles_in_place<P>(sums, copies, warp_m, warp_n);
    else
        add_tiles<P>(sums, copies, warp_m, warp_n);
    const int m = block.m + warp_m, n = block.n + warp_n;
    if constexpr (S::schedule == Schedule::in_place)
        if (block.m + S::block_tile_m <= M && block.n + S::block_tile_n <= N)
            return store<P, true>(out, initial, scale(), sums, m, n, M, N);
    store<P, false>(out, initial, scale(), sums, m, n, M, N);
}

template <class Z>
Grid grid_of(int64_t M, int64_t N, hipStream_t stream) {
    const int64_t blocks = int64_t{blocks_for(M, Z::block_tile_m)} * blocks_for(N, Z::block_tile_n);
    return Grid(blocks_for(blocks, 1), Z::threads, stream, Z::shared_bytes);
}

}  // namespace llamac::tiled
