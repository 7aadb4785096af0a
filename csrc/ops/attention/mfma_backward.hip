// Attention backward for CDNA3 (MI300X), variant `mfma` of attention.hip: five products in one pass. A block owns 128 keys, each
// of its warps 16 of them, and walks over the queries that see them:
//
//   - q and dout are transposed on their way to LDS, once per block, beside their rows; k, once, in registers
//   - ds goes through LDS to the warps that multiply it with k, each for 16 elements of dq
//   - blocks add to dq in memory in turns, in the order of their keys, so every sum has the same order in every run; with masks,
//     the blocks that have a step are neighbors, for the keys that a query sees begin and end no earlier than the query's before
//   - sums and turns are accessed by load_word(), store_word() and add_word() alone, so that XCDs agree (matrix_on_amd.h)
//   - reads of LDS are issued ahead of their products, in an order that is given
//   - p and ds are cut instead of rounded (mfma.h)
#include "ops/attention/mfma.h"

#if defined(LLAMAC_MFMA)
namespace llamac {
namespace {

// A block's `rows`, `warp_tile_rows` of a warp, and `step` rows per step of what it walks over.
template <int HD_, int warps, int row_tiles_>
struct MfmaWalk {
    static constexpr int HD = HD_, threads = warps * warp_size, row_tiles = row_tiles_,
                         warp_tile_rows = row_tiles * 16;
    static constexpr int rows = warps * warp_tile_rows, step = HD == 64 ? 64 : 32;
    static constexpr int part_tiles = step / 16, head_tiles = HD / 16;
    static constexpr int ahead = row_tiles == 1 ? 4 : 3;  // reads of LDS, before their products
    static constexpr int row_bytes = rows * HD * 2, step_bytes = step * HD * 2;
};
// q, dout and their columns, of one step; and ds, whose rows are queries and whose columns are the block's keys.
template <int HD>
struct MfmaKeys : MfmaWalk<HD, 8, 1> {
    using Base = MfmaWalk<HD, 8, 1>;
    // A warp adds to dq of 16 elements of 32 queries of the step: accumulators, in the order in which its lanes have them.
    static constexpr int dq_tiles = 2, dq_floats = dq_tiles * 256;
    static_assert(8 * dq_floats == Base::step * HD);
    static constexpr int ds_at = 4 * Base::step_bytes;
    static constexpr int shared_bytes = ds_at + Base::step * Base::rows * 2;
    static_assert(Base::row_bytes <= shared_bytes);
};

// Of each query: p = 2^(c s + shift), c = scale * log2 e, and ds = p (dp + minus_delta); both f32[B,NH,T], with T rounded up to
// whole steps. Queries that do not exist get p = 0. keys: where those that a query sees begin, and where they end, i32[B,2,T]; of
// queries that do not exist as of the last. sums: dq / scale, f32[B,NH,T,HD] in the order of MfmaKeys. turns: the block after the
// one that has added to a step of a head last. begun: how many blocks have begun, per XCD.
struct MfmaWorkspace {
    float *shift, *minus_delta, *sums;
    int *keys, *turns, *begun;
    int64_t time;

    MfmaWorkspace(void* workspace, int64_t B, int64_t NH, int64_t T, int64_t HD)
        : shift(static_cast<float*>(workspace)),
          minus_delta(shift + B * NH * padded(T)),
          sums(minus_delta + B * NH * padded(T)),
          keys(reinterpret_cast<int*>(sums + B * NH * padded(T) * HD)),
          turns(keys + 2 * B * padded(T)),
          begun(turns + B * NH * padded(T) / least_step),
          time(padded(T)) {}
    static constexpr int least_step = 32;
    static constexpr int counters = 8;  // of the device that has most XCDs: the host does not know xcds
    static constexpr int64_t padded(int64_t T) { return (T + 63) / 64 * 64; }
    static int64_t bytes(int64_t B, int64_t NH, int64_t T, int64_t HD) {
        return (B * NH * padded(T) * (2 + HD) + 2 * B * padded(T) + B * NH * padded(T) / least_step +
                counters) *
               4;
    }
};

// The row of a thread in blocks of 256, `lanes` threads per row. A block's rows are of one head, found by one division per block: a
// thread of its own takes longer to divide than to load.
template <int lanes>
struct BlockRows {
    int64_t b, h, t, i;  // i: of [B,NH,T]

    __device__ BlockRows(int64_t time, int64_t heads) {
        constexpr int rows = 256 / lanes;
        static_assert(MfmaWorkspace::padded(1) % rows == 0);
        const unsigned blocks = static_cast<unsigned>(time / rows), head = blockIdx.x / blocks;
        b = head / static_cast<unsigned>(heads), h = head % static_cast<unsigned>(heads);
        t = int64_t{blockIdx.x - head * blocks} * rows + threadIdx.x / lanes;
        i = head * time + t;
    }
};

// Also clears the counters.
template <class E, int HD>
__global__ void __launch_bounds__(256)
    attention_backward_mfma_kernel_statistics(MfmaWorkspace work, View<const E, 4> dout, View<const E, 4> out,
                                              View<const float, 3> lse, AttentionMask visible) {
    constexpr int lanes = HD / vector_size<E>;
    const BlockRows<lanes> block(work.time, out.shape[2]);
    const int64_t b = block.b, h = block.h, t = block.t, i = block.i;
    const bool inside = t < out.shape[1];
    const float delta = row_delta<HD>(dout, out, b, t, h, inside);
    if (static_cast<int>(threadIdx.x) % lanes == 0) {
        work.shift[i] = inside ? raised<E> - lse(b, h, t) * log2_e : -INFINITY;
        work.minus_delta[i] = inside ? -delta : 0;
        if (h == 0) {
            int* const keys = work.keys + 2 * b * work.time + t;
            const int64_t query = inside ? t : out.shape[1] - 1;
            keys[0] = static_cast<int>(visible.begin(b, query));
            keys[work.time] = static_cast<int>(visible.end(b, query));
        }
    }
    const int64_t thread = int64_t{blockIdx.x} * 256 + threadIdx.x;
    if (thread < work.begun + MfmaWorkspace::counters - work.turns) work.turns[thread] = 0;
}

using T = Tile;

// The rows that the block owns come to LDS.
template <class C, class E, int HD = C::HD>
__device__ SharedTile<HD> copy_rows(const E* from, int64_t stride, int valid) {
    const SharedTile<HD> shared{dynamic_shared_memory()};
    TileCopy<C::rows, HD, C::threads> copy;
    copy.begin(shared, from, stride, valid);
    copy.end();
    __syncthreads();
    return shared;
}

// Rows of the transposed operand: column + T::row() of the tile, all its rows as k, in the order of load_rows.
template <int count, int HD>
__device__ void take_column(T::Operand (&out)[count], SharedTile<HD> from, int column) {
    column += T::row();
#pragma unroll
    for (int j = 0; j < count; j++)
#pragma unroll
        for (int w = 0; w < 2; w++) {
            uint32_t half[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = j / 2 * 32 + 8 * T::group() + j % 2 * 4 + 2 * w + i;
                half[i] = *reinterpret_cast<const uint16_t*>(from.at(row, column / 8) + column % 8 * 2);
            }
            out[j].words[w] = lower_halves(half[0], half[1]);
        }
}

// A sum of a block's rows, scaled, rounded and stored. All warps are done with LDS, and are again after it.
template <class C, class E, int HD = C::HD>
__device__ void store_sum(E* to, int64_t stride, T::Accumulator (&sum)[C::row_tiles][C::head_tiles],
                          float scale, int valid) {
    const SharedTile<HD> shared{dynamic_shared_memory()};
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++)
#pragma unroll
        for (int n = 0; n < C::head_tiles; n++) {
#pragma unroll
            for (int i = 0; i < T::elements; i++) sum[r][n].x[i] *= scale;
            T::store_operand(shared, warp_index() * C::warp_tile_rows + r * 16, n * 16,
                             T::as_operand<E>(sum[r][n]));
        }
    __syncthreads();
    store_tile<C::rows, HD, C::threads>(to, stride, shared, valid);
    __syncthreads();
}

// Blocks in the order in which they begin: a block waits for those before it alone. Of an XCD's heads where it gets whole heads.
__device__ inline BlockTile begun_block_tile(int* begun, int blocks, int heads) {
    int* const shared = reinterpret_cast<int*>(dynamic_shared_memory());
    const int count = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    const bool whole = count / blocks % xcds == 0;
    if (threadIdx.x == 0) {
        const int number = atomicAdd(begun + (whole ? block % xcds : 0), 1);
        *shared = whole ? number * xcds + block % xcds : number;
    }
    __syncthreads();
    const BlockTile tile = block_tile_of<int>(blocks, heads, warp_uniform(*shared), count);
    __syncthreads();
    const auto uniform = [](int64_t x) { return int64_t{warp_uniform(static_cast<int>(x))}; };
    return {uniform(tile.batch), uniform(tile.head), uniform(tile.block)};
}

template <class E, int HD, bool masked>
__global__ void __launch_bounds__(MfmaKeys<HD>::threads) LLAMAC_WAVES_A_SIMD(2)
    attention_backward_mfma_kernel(View<E, 4> dk, View<E, 4> dv, View<const E, 4> dout, MfmaWorkspace work,
                                   View<const E, 4> q, View<const E, 4> k, View<const E, 4> v, float scale) {
    using C = MfmaKeys<HD>;
    constexpr int half = C::threads / 2, parts = HD / 16;
    const int time = static_cast<int>(q.shape[1]), seen = masked ? static_cast<int>(k.shape[1]) : time,
              heads = static_cast<int>(k.shape[2]), group = static_cast<int>(q.shape[2]) / heads;
    const BlockTile tile = begun_block_tile(work.begun, (seen + C::rows - 1) / C::rows, heads);
    const int block = static_cast<int>(tile.block), first = block * C::rows;  // more queries come first
    const int warp = warp_uniform(warp_index()), row = first + warp * C::warp_tile_rows;
    const int thread = static_cast<int>(threadIdx.x);

    WarpRows<T, HD, C::row_tiles, true> rows_k, rows_v;
    T::Operand column_k[C::rows / 16];
    {
        const SharedTile<HD> shared =
            copy_rows<C>(row_of(k, tile.batch, first, tile.head), k.stride[1], seen - first);
        rows_k.take(shared, warp * C::warp_tile_rows);
        take_column(column_k, shared, warp % parts * 16);
        __syncthreads();
        copy_rows<C>(row_of(v, tile.batch, first, tile.head), v.stride[1], seen - first);
        rows_v.take(shared, warp * C::warp_tile_rows);
        __syncthreads();
    }
    T::Accumulator sum_k[C::row_tiles][C::head_tiles] = {}, sum_v[C::row_tiles][C::head_tiles] = {};

    char* const shared = dynamic_shared_memory();
    const SharedTile<HD> shared_q{shared}, shared_dout{shared + C::step_bytes};
    const ColumnTile<C::step, HD> columns_q{shared + 2 * C::step_bytes},
        columns_dout{shared + 3 * C::step_bytes};
    const SharedTile<C::rows> shared_ds{shared + C::ds_at};
    // Half of the block's warps transpose q, the others dout.
    const bool of_dout = warp >= half / 64;
    const int q_pitch = static_cast<int>(q.stride[1]) * 2, dout_pitch = static_cast<int>(dout.stride[1]) * 2;
    RowsCopy<C::step, HD, C::threads> copy_q, copy_dout;
    ColumnsCopy<C::step, HD, half> copy_columns;
    const int kept = ColumnTile<C::step, HD>::offset(T::row(), T::group());
    const int own_key = warp * C::warp_tile_rows + T::row();
    // The queries of a step: from t0 on, of a head of the group. Steps go from the last queries to the first, so that blocks that
    // begin one after the other can add to dq in their order, through all heads of the group.
    int start = first / C::step * C::step, last = (time - 1) / C::step * C::step;
    // With masks: the last step of the block before, and the queries that see all keys of the warp.
    int last_before = 0, all_from = 0, all_to = 0;
    const int* const keys = work.keys + 2 * tile.batch * work.time;
    if constexpr (masked) {
        const auto last_step = [](int end) { return (end + C::step - 1) / C::step * C::step - C::step; };
        // Each lane searches for one of them: the first query whose keys begin, or end, behind a key.
        const int lane = smaller(lane_index(), 4), last_key = row + C::warp_tile_rows - 1;
        const int* const ends_or_begins = lane < 2 ? keys + work.time : keys;
        const int key = lane == 0   ? first
                        : lane == 1 ? last_key
                        : lane == 2 ? smaller(first + C::rows, seen) - 1
                        : lane == 3 ? first - 1
                                    : row;
        const int found = first_where(time, [&](int t) { return ends_or_begins[t] > key; });
        const auto of_lane = [&](int i) { return warp_uniform(__shfl(found, i)); };
        start = of_lane(0) / C::step * C::step, all_from = of_lane(1), last = last_step(of_lane(2));
        last_before = last_step(of_lane(3)), all_to = of_lane(4);
        if (all_to == time) all_to += C::step;  // the last step ends behind the last query
    }
    const bool none = masked && start > last;
    const int64_t query_head = tile.head * group;
    const E* const last_q = row_of(q, tile.batch, last, query_head);
    const E* const last_dout = row_of(dout, tile.batch, last, query_head);
    const char *next_q, *next_dout;
    const auto begin_head = [&](int head) {
        next_q = reinterpret_cast<const char*>(last_q + head * q.stride[2]);
        next_dout = reinterpret_cast<const char*>(last_dout + head * dout.stride[2]);
    };
    const auto begin_rows = [&](int t0) {
        copy_q.begin(next_q, q_pitch, time - t0);
        copy_dout.begin(next_dout, dout_pitch, time - t0);
    };
    const auto begin_columns = [&](int t0) {
        copy_columns.begin(of_dout ? next_dout : next_q, of_dout ? dout_pitch : q_pitch, time - t0,
                           thread % half);
    };
    const auto pair = [](const uint32_t* bits) {
        return Pair{__uint_as_float(bits[0]), __uint_as_float(bits[1])};
    };
    if (!none) {
        begin_head(0);
        begin_rows(last);
        begin_columns(last);
    }
    const int64_t statistics_at = (tile.batch * q.shape[2] + query_head) * work.time;
    int64_t added = -1;  // the turn of the sums on their way
    for (int head = none ? group : 0, t0 = last; head < group;) {
        copy_q.end(shared_q);
        copy_dout.end(shared_dout);
        __syncthreads();  // and the last step's columns and ds are read
        const int64_t at = statistics_at + head * work.time + t0;
        const int* const turn = work.turns + at / C::step;
        float* const sums = work.sums + at * HD + warp * C::dq_floats;
        int now = load_word(turn);
        // Of the queries of this lane's columns.
        uint32_t shift[C::part_tiles][T::elements], minus_delta[C::part_tiles][T::elements];
        const int columns = optimization_barrier(T::column(0) * 4);
#pragma unroll
        for (int n = 0; n < C::part_tiles; n++) {
            load_words(shift[n], reinterpret_cast<const char*>(work.shift + at) + n * 64, columns);
            load_words(minus_delta[n], reinterpret_cast<const char*>(work.minus_delta + at) + n * 64,
                       columns);
        }
        const int query = t0;
        const bool ends = t0 == start;
        t0 = ends ? last : t0 - C::step, head += ends;

        T::Accumulator p[C::row_tiles][C::part_tiles] = {}, dp[C::row_tiles][C::part_tiles];
        T::Operand shares[C::row_tiles][C::part_tiles], ds[C::row_tiles][C::part_tiles];
        add_product<E, C::ahead>(p, rows_k, shared_q);
#pragma unroll
        for (int n = 0; n < C::part_tiles; n++)
#pragma unroll
            for (int i = 0; i < T::elements; i++) dp[0][n].x[i] = __uint_as_float(minus_delta[n][i]);
        add_product<E, C::ahead>(dp, rows_v, shared_dout);
        if constexpr (masked) {
            if (query < all_from || query + C::step > all_to) {
#pragma unroll
                for (int n = 0; n < C::part_tiles; n++) {
                    uint32_t begin[T::elements], end[T::elements];
                    const char* const at = reinterpret_cast<const char*>(keys + query + n * 16);
                    load_words(begin, at, columns);
                    load_words(end, at + work.time * 4, columns);
#pragma unroll
                    for (int i = 0; i < T::elements; i++)
                        hide_unseen(p[0][n].x[i], static_cast<int>(begin[i]), static_cast<int>(end[i]),
                                    first + own_key);
                }
            }
        } else if (query - row < C::warp_tile_rows - 1) {
            mask<T, Masked::columns_before>(p, query - row);
        }
#pragma unroll
        for (int n = 0; n < C::part_tiles; n++)
#pragma unroll
            for (int w = 0; w < 2; w++) {
                const float *const x = p[0][n].x + 2 * w, *const d = dp[0][n].x + 2 * w;
                const Pair exponent = Pair{x[0], x[1]} * (scale * log2_e) + pair(shift[n] + 2 * w);
                const Pair share{fast_exp2(exponent[0]), fast_exp2(exponent[1])};
                shares[0][n].words[w] = cut<E>(share);
                const uint32_t bits = cut<E>(share * Pair{d[0], d[1]});
                ds[0][n].words[w] = bits;
#pragma unroll
                for (int i = 0; i < 2; i++)
                    *reinterpret_cast<uint16_t*>(shared_ds.at(n * 16 + T::column(2 * w + i), own_key / 8) +
                                                 own_key % 8 * 2) = static_cast<uint16_t>(bits >> 16 * i);
            }
        copy_columns.end(of_dout ? columns_dout : columns_q, thread % half);
        wait_for_memory();
        __syncthreads();  // and q and dout are read, the last step's sums are added
        if (added >= 0 && thread == 0) store_word(work.turns + added, block + 1);
        added = at / C::step;
        if (head < group) {
            if (ends)
                begin_head(head);
            else
                next_q -= C::step * q_pitch, next_dout -= C::step * dout_pitch;
            begin_rows(t0);
        }
        add_product<E, C::ahead>(sum_v, shares, columns_dout, kept);
        add_product<E, C::ahead>(sum_k, ds, columns_q, kept);
        T::Accumulator dq[C::dq_tiles] = {};
        products_with_reads<C::dq_tiles * C::rows / 32, C::ahead>(
            [&](T::Operand(&rows)[2], int i) {
                T::load_rows(rows, shared_ds, (warp / parts * 2 + i % 2) * 16, i / 2 * 32);
            },
            [&](int i, const T::Operand(&rows)[2]) {
#pragma unroll
                for (int h = 0; h < 2; h++) T::multiply<E>(dq[i % 2], column_k[i / 2 * 2 + h], rows[h]);
            });
        const auto on_sums = [&](auto f) {
#pragma unroll
            for (int n = 0; n < C::dq_tiles; n++)
#pragma unroll
                for (int i = 0; i < T::elements; i++)
                    f(sums + (n * T::elements + i) * 64 + lane_index(), dq[n].x[i]);
        };
        const bool is_first = masked ? query > last_before : block == 0;  // of the blocks that have the step
        while ((!masked || !is_first) && now != block) now = load_word(turn);
        if (is_first)
            on_sums([](float* to, float x) { store_word(to, x); });
        else
            on_sums([](float* to, float x) { add_word(to, x); });
        if (head < group) begin_columns(t0);
    }
    wait_for_memory();
    __syncthreads();
    if (!none && thread == 0) store_word(work.turns + added, block + 1);
    store_sum<C>(row_of(dk, tile.batch, first, tile.head), dk.stride[1], sum_k, scale, seen - first);
    store_sum<C>(row_of(dv, tile.batch, first, tile.head), dv.stride[1], sum_v, 1, seen - first);
}

// dq from its sums, scaled and rounded: a thread has eight elements.
template <class E, int HD>
__global__ void __launch_bounds__(256)
    attention_backward_mfma_kernel_round(View<E, 4> dq, const float* sums, int64_t padded, float scale) {
    using C = MfmaKeys<HD>;
    constexpr int vectors = HD / 8;
    const BlockRows<vectors> block(padded, dq.shape[2]);
    const int64_t b = block.b, h = block.h, t = block.t, i = block.i;
    const int d = static_cast<int>(threadIdx.x % vectors) * 8, query = static_cast<int>(i % C::step);
    if (t >= dq.shape[1]) return;
    const int part = query / 32 * (HD / 16) + d / 16, tile = query % 32 / 16 * 4 + query % 4,
              lane = query % 16 / 4 * 16 + d % 16;
    const float* const from = sums + (i - query) * HD + part * C::dq_floats + tile * 64 + lane;
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; w++) words[w] = pair_bits<E>(from[2 * w] * scale, from[2 * w + 1] * scale);
    store_vector(reinterpret_cast<uint4*>(row_of(dq, b, t, h) + d),
                 make_uint4(words[0], words[1], words[2], words[3]));
}

template <class E>
void attention_backward_mfma(View<E, 4> dq, View<E, 4> dk, View<E, 4> dv, View<const E, 4> dout,
                             View<const E, 4> out, View<const float, 3> lse, View<const E, 4> q,
                             View<const E, 4> k, View<const E, 4> v, View<const int32_t, 2> first,
                             View<const int32_t, 2> ends, double scale_, bool causal, int64_t window,
                             LaunchContext context) {
    const float scale = static_cast<float>(scale_);
    const AttentionMask visible(q, k, first, ends, causal, window);
    const MfmaWorkspace work(context.workspace, q.shape[0], q.shape[2], q.shape[1], q.shape[3]);
    on_heads(visible, q, [&](auto head, auto masks) {
        constexpr int HD = decltype(head)::value;
        using C = MfmaKeys<HD>;
        const int64_t vectors = q.shape[0] * q.shape[2] * work.time * (HD / vector_size<E>);
        launch(Grid(blocks_for(vectors, 256), 256, context.stream),
               attention_backward_mfma_kernel_statistics<E, HD>, work, dout, out, lse, visible);
        const int64_t blocks = (k.shape[1] + C::rows - 1) / C::rows * k.shape[2] * k.shape[0];
        launch(Grid(blocks_for(blocks, 1), C::threads, context.stream, C::shared_bytes),
               attention_backward_mfma_kernel<E, HD, decltype(masks)::value != no_masks>, dk, dv, dout, work,
               q, k, v, scale);
        launch(Grid(blocks_for(vectors, 256), 256, context.stream),
               attention_backward_mfma_kernel_round<E, HD>, dq, work.sums, work.time, scale);
    });
}

}  // namespace

Variant mfma_attention_backward() {
    return {.name = "mfma",
            .idea = "as flash on matrix cores, tiles transposed once per block, 128-bit accesses",
            .instantiations = instantiations<attention_backward_mfma<bf16>, attention_backward_mfma<fp16>>(),
            .supports = mfma_constraints,
            .workspace = [](const Call& c) { return MfmaWorkspace::bytes(c["B"], c["NH"], c["T"], c["HD"]); },
            .chip = mfma_chip};
}

}  // namespace llamac
#endif
