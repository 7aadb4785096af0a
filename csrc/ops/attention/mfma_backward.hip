// Attention backward for CDNA3 (MI300X), variant `mfma` of attention.hip: the two kernels of `flash` (flash_backward.hip), causal
// and without other masks, but
//
//   - what a product sums over the rows of is transposed on its way to LDS, once per block: k for the queries' kernel, q and
//     dout for the keys' kernel, which have them as rows, too
//   - reads of LDS are issued ahead of their products, in an order that is given
//   - p and ds are cut instead of rounded (mfma.h)
//
// Every sum is one warp's own, in the same order in every run.
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
// k, v, and the columns of k.
template <int HD>
struct MfmaQueries : MfmaWalk<HD, 4, 2> {
    using Base = MfmaWalk<HD, 4, 2>;
    static constexpr int shared_bytes =
        Base::row_bytes > 3 * Base::step_bytes ? Base::row_bytes : 3 * Base::step_bytes;
};
// Two stages of q, dout and their columns: one is filled while the other is used.
template <int HD>
struct MfmaKeys : MfmaWalk<HD, 8, 1> {
    using Base = MfmaWalk<HD, 8, 1>;
    static constexpr int stage_bytes = 4 * Base::step_bytes;
    static constexpr int shared_bytes = 2 * stage_bytes;
    static_assert(Base::row_bytes <= shared_bytes);
};

// Of each query: p = 2^(c s + shift), c = scale * log2 e, and ds = p (dp + minus_delta); both f32[B,NH,T], with T rounded up to
// whole steps. Queries that do not exist get p = 0.
struct MfmaStatistics {
    float *shift, *minus_delta;
    int64_t time;

    MfmaStatistics(void* workspace, int64_t B, int64_t NH, int64_t T)
        : shift(static_cast<float*>(workspace)), minus_delta(shift + B * NH * padded(T)), time(padded(T)) {}
    static int64_t padded(int64_t T) { return (T + 63) / 64 * 64; }
};

template <class E, int HD>
__global__ void __launch_bounds__(256)
    attention_backward_mfma_kernel_statistics(MfmaStatistics statistics, View<const E, 4> dout,
                                              View<const E, 4> out, View<const float, 3> lse) {
    constexpr int lanes = HD / vector_size<E>;
    const int64_t time = out.shape[1], heads = out.shape[2];
    const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / lanes;  // of [B,NH,T]
    const int64_t b = i / statistics.time / heads, h = i / statistics.time % heads, t = i % statistics.time;
    const bool inside = b < out.shape[0] && t < time;
    const float delta = row_delta<HD>(dout, out, b, t, h, inside);
    if (b < out.shape[0] && static_cast<int>(threadIdx.x) % lanes == 0) {
        statistics.shift[i] = inside ? raised<E> - lse(b, h, t) * log2_e : -INFINITY;
        statistics.minus_delta[i] = inside ? -delta : 0;
    }
}

using T = Tile<16>;

// The rows that the block owns, taken by its warps; the place is free afterwards.
template <class C, class E, int HD = C::HD>
__device__ void take_rows(WarpRows<T, HD, C::row_tiles, true>& rows, const E* from, int64_t stride,
                          int valid) {
    const SharedTile<HD> shared{dynamic_shared_memory()};
    TileCopy<C::rows, HD, C::threads> copy;
    copy.begin(shared, from, stride, valid);
    copy.end();
    __syncthreads();
    rows.take(shared, warp_index() * C::warp_tile_rows);
    __syncthreads();
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
                             T::as_operand<E>(sum[r][n], 0));
        }
    __syncthreads();
    store_tile<C::rows, HD, C::threads>(to, stride, shared, valid);
    __syncthreads();
}

template <class E, int HD>
__global__ void __launch_bounds__(MfmaQueries<HD>::threads) LLAMAC_WAVES_A_SIMD(2)
    attention_backward_mfma_kernel_queries(View<E, 4> dq, View<const E, 4> dout, MfmaStatistics statistics,
                                           View<const E, 4> q, View<const E, 4> k, View<const E, 4> v,
                                           float scale) {
    using C = MfmaQueries<HD>;
    const int time = static_cast<int>(q.shape[1]), blocks = (time + C::rows - 1) / C::rows;
    const BlockTile tile = uniform_block_tile(blocks, static_cast<int>(q.shape[2]));
    const int64_t key_head =
        warp_uniform(static_cast<int>(tile.head) / static_cast<int>(q.shape[2] / k.shape[2]));
    const int first = (blocks - 1 - static_cast<int>(tile.block)) * C::rows;  // more keys come first
    const int row = first + warp_uniform(warp_index()) * C::warp_tile_rows,
              thread = static_cast<int>(threadIdx.x);
    const SharedTile<HD> shared_k{dynamic_shared_memory()}, shared_v{shared_k.data + C::step_bytes};
    const ColumnTile<C::step, HD> columns_k{shared_v.data + C::step_bytes};

    WarpRows<T, HD, C::row_tiles, true> rows_q, rows_dout;
    take_rows<C>(rows_q, row_of(q, tile.batch, first, tile.head), q.stride[1], time - first);
    take_rows<C>(rows_dout, row_of(dout, tile.batch, first, tile.head), dout.stride[1], time - first);
    float shift[C::row_tiles], minus_delta[C::row_tiles];
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++) {
        const int t = row + r * 16 + T::row();
        const int64_t at = (tile.batch * q.shape[2] + tile.head) * statistics.time + t;
        shift[r] = t < time ? statistics.shift[at] : -INFINITY;
        minus_delta[r] = t < time ? statistics.minus_delta[at] : 0;
    }
    T::Accumulator sum[C::row_tiles][C::head_tiles] = {};

    const int end = smaller(time, first + C::rows);
    const int k_pitch = static_cast<int>(k.stride[1]) * 2, v_pitch = static_cast<int>(v.stride[1]) * 2;
    const char* next_k = reinterpret_cast<const char*>(row_of(k, tile.batch, 0, key_head));
    const char* next_v = reinterpret_cast<const char*>(row_of(v, tile.batch, 0, key_head));
    RowsCopy<C::step, HD, C::threads> copy_k, copy_v;
    ColumnsCopy<C::step, HD, C::threads> copy_columns;
    const int kept = columns_k.offset(T::row(), T::group());
    copy_k.begin(next_k, k_pitch, time);
    copy_v.begin(next_v, v_pitch, time);
    for (int s0 = 0; s0 < end; s0 += C::step) {
        const bool any = s0 < row + C::warp_tile_rows;
        copy_k.end(shared_k);
        copy_v.end(shared_v);
        __syncthreads();  // and the last step's columns are read
        copy_columns.begin(next_k, k_pitch, time - s0, thread);
        next_k += C::step * k_pitch, next_v += C::step * v_pitch;
        if (s0 + C::step < end) {
            copy_k.begin(next_k, k_pitch, time - s0 - C::step);
            copy_v.begin(next_v, v_pitch, time - s0 - C::step);
        }
        T::Operand ds[C::row_tiles][C::part_tiles];
        if (any) {
            T::Accumulator p[C::row_tiles][C::part_tiles] = {}, dp[C::row_tiles][C::part_tiles] = {};
            add_product<E, C::ahead>(p, rows_q, shared_k);
            add_product<E, C::ahead>(dp, rows_dout, shared_v);
            if (s0 + C::step - 1 > row) mask<T, Masked::columns_after>(p, s0 - row);
#pragma unroll
            for (int r = 0; r < C::row_tiles; r++)
#pragma unroll
                for (int n = 0; n < C::part_tiles; n++)
#pragma unroll
                    for (int w = 0; w < 2; w++) {
                        const float *const x = p[r][n].x + 2 * w, *const d = dp[r][n].x + 2 * w;
                        const Pair exponent = Pair{x[0], x[1]} * (scale * log2_e) + shift[r];
                        const Pair share{fast_exp2(exponent[0]), fast_exp2(exponent[1])};
                        ds[r][n].words[0][w] = cut<E>(share * (Pair{d[0], d[1]} + minus_delta[r]));
                    }
        }
        copy_columns.end(columns_k, thread);
        __syncthreads();  // and k and v are read
        if (any) add_product<E, C::ahead>(sum, ds, columns_k, kept);
    }
    __syncthreads();
    store_sum<C>(row_of(dq, tile.batch, first, tile.head), dq.stride[1], sum, scale, time - first);
}

template <class E, int HD>
__global__ void __launch_bounds__(MfmaKeys<HD>::threads) LLAMAC_WAVES_A_SIMD(2)
    attention_backward_mfma_kernel_keys(View<E, 4> dk, View<E, 4> dv, View<const E, 4> dout,
                                        MfmaStatistics statistics, View<const E, 4> q, View<const E, 4> k,
                                        View<const E, 4> v, float scale) {
    using C = MfmaKeys<HD>;
    constexpr int half = C::threads / 2;
    const int time = static_cast<int>(q.shape[1]), heads = static_cast<int>(k.shape[2]),
              group = static_cast<int>(q.shape[2]) / heads;
    const BlockTile tile = uniform_block_tile((time + C::rows - 1) / C::rows, heads);
    const int first = static_cast<int>(tile.block) * C::rows;  // more queries come first
    const int warp = warp_uniform(warp_index()), row = first + warp * C::warp_tile_rows;
    const int thread = static_cast<int>(threadIdx.x);

    WarpRows<T, HD, C::row_tiles, true> rows_k, rows_v;
    take_rows<C>(rows_k, row_of(k, tile.batch, first, tile.head), k.stride[1], time - first);
    take_rows<C>(rows_v, row_of(v, tile.batch, first, tile.head), v.stride[1], time - first);
    T::Accumulator sum_k[C::row_tiles][C::head_tiles] = {}, sum_v[C::row_tiles][C::head_tiles] = {};

    // Half of the block's warps transpose q, the others dout.
    const bool of_dout = warp >= half / 64;
    const int q_pitch = static_cast<int>(q.stride[1]) * 2, dout_pitch = static_cast<int>(dout.stride[1]) * 2;
    RowsCopy<C::step, HD, C::threads> copy_q, copy_dout;
    ColumnsCopy<C::step, HD, half> copy_columns;
    const int kept = ColumnTile<C::step, HD>::offset(T::row(), T::group());
    // The queries of a step: from t0 on, of a head of the group. They follow one another through all its heads.
    const int start = first / C::step * C::step;
    const char *next_q, *next_dout, *next_shift, *next_delta;
    const auto begin_head = [&](int head) {
        const int64_t query_head = tile.head * group + head;
        next_q = reinterpret_cast<const char*>(row_of(q, tile.batch, start, query_head));
        next_dout = reinterpret_cast<const char*>(row_of(dout, tile.batch, start, query_head));
        const int64_t at = (tile.batch * q.shape[2] + query_head) * statistics.time + start;
        next_shift = reinterpret_cast<const char*>(statistics.shift + at);
        next_delta = reinterpret_cast<const char*>(statistics.minus_delta + at);
    };
    const auto begin_step = [&](int t0) {
        copy_q.begin(next_q, q_pitch, time - t0);
        copy_dout.begin(next_dout, dout_pitch, time - t0);
        copy_columns.begin(of_dout ? next_dout : next_q, of_dout ? dout_pitch : q_pitch, time - t0,
                           thread % half);
        next_q += C::step * q_pitch, next_dout += C::step * dout_pitch;
        next_shift += C::step * 4, next_delta += C::step * 4;
    };
    const auto pair = [](const uint32_t* bits) {
        return Pair{__uint_as_float(bits[0]), __uint_as_float(bits[1])};
    };
    begin_head(0);
    begin_step(start);
    int stage = 0;
    for (int head = 0, t0 = start; head < group;) {
        char* const shared = dynamic_shared_memory() + stage;
        const char *const this_shift = next_shift - C::step * 4, *const this_delta = next_delta - C::step * 4;
        const SharedTile<HD> shared_q{shared}, shared_dout{shared + C::step_bytes};
        const ColumnTile<C::step, HD> columns_q{shared + 2 * C::step_bytes},
            columns_dout{shared + 3 * C::step_bytes};
        copy_q.end(shared_q);
        copy_dout.end(shared_dout);
        copy_columns.end(of_dout ? columns_dout : columns_q, thread % half);
        __syncthreads();  // and the other stage is read
        stage = C::stage_bytes - stage;
        // Of the queries of this lane's columns.
        uint32_t shift[C::part_tiles][T::elements], minus_delta[C::part_tiles][T::elements];
        const int columns = optimization_barrier(T::column(0) * 4);
#pragma unroll
        for (int n = 0; n < C::part_tiles; n++) {
            load_words(shift[n], this_shift + n * 64, columns);
            load_words(minus_delta[n], this_delta + n * 64, columns);
        }
        const int query = t0;
        const bool last = t0 + C::step >= time;
        t0 = last ? start : t0 + C::step, head += last;
        if (head < group) {
            if (last) begin_head(head);
            begin_step(t0);
        }
        if (query + C::step <= row) continue;  // all before the warp's keys

        T::Accumulator p[C::row_tiles][C::part_tiles] = {}, dp[C::row_tiles][C::part_tiles] = {};
        T::Operand shares[C::row_tiles][C::part_tiles], ds[C::row_tiles][C::part_tiles];
        add_product<E, C::ahead>(p, rows_k, shared_q);
        add_product<E, C::ahead>(dp, rows_v, shared_dout);
        if (query - row < C::warp_tile_rows - 1) mask<T, Masked::columns_before>(p, query - row);
#pragma unroll
        for (int r = 0; r < C::row_tiles; r++)
#pragma unroll
            for (int n = 0; n < C::part_tiles; n++)
#pragma unroll
                for (int w = 0; w < 2; w++) {
                    const float *const x = p[r][n].x + 2 * w, *const d = dp[r][n].x + 2 * w;
                    const Pair exponent = Pair{x[0], x[1]} * (scale * log2_e) + pair(shift[n] + 2 * w);
                    const Pair share{fast_exp2(exponent[0]), fast_exp2(exponent[1])};
                    shares[r][n].words[0][w] = cut<E>(share);
                    ds[r][n].words[0][w] = cut<E>(share * (Pair{d[0], d[1]} + pair(minus_delta[n] + 2 * w)));
                }
        add_product<E, C::ahead>(sum_v, shares, columns_dout, kept);
        add_product<E, C::ahead>(sum_k, ds, columns_q, kept);
    }
    __syncthreads();
    store_sum<C>(row_of(dk, tile.batch, first, tile.head), dk.stride[1], sum_k, scale, time - first);
    store_sum<C>(row_of(dv, tile.batch, first, tile.head), dv.stride[1], sum_v, 1, time - first);
}

}  // namespace

template <class E>
void attention_backward_mfma(View<E, 4> dq, View<E, 4> dk, View<E, 4> dv, View<const E, 4> dout,
                             View<const E, 4> out, View<const float, 3> lse, View<const E, 4> q,
                             View<const E, 4> k, View<const E, 4> v, View<const int32_t, 2>,
                             View<const int32_t, 2>, double scale_, bool, int64_t, LaunchContext context) {
    const float scale = static_cast<float>(scale_);
    const MfmaStatistics statistics(context.workspace, q.shape[0], q.shape[2], q.shape[1]);
    const auto on_head = [&](auto head) {
        constexpr int HD = decltype(head)::value;
        using OfKeys = MfmaKeys<HD>;
        using OfQueries = MfmaQueries<HD>;
        const auto blocks = [](const View<const E, 4>& x, int rows) {
            return blocks_for((x.shape[1] + rows - 1) / rows * x.shape[2] * x.shape[0], 1);
        };
        const int64_t vectors = q.shape[0] * q.shape[2] * statistics.time * (HD / vector_size<E>);
        launch(Grid(blocks_for(vectors, 256), 256, context.stream),
               attention_backward_mfma_kernel_statistics<E, HD>, statistics, dout, out, lse);
        launch(Grid(blocks(k, OfKeys::rows), OfKeys::threads, context.stream, OfKeys::shared_bytes),
               attention_backward_mfma_kernel_keys<E, HD>, dk, dv, dout, statistics, q, k, v, scale);
        launch(Grid(blocks(q, OfQueries::rows), OfQueries::threads, context.stream, OfQueries::shared_bytes),
               attention_backward_mfma_kernel_queries<E, HD>, dq, dout, statistics, q, k, v, scale);
    };
    if (q.shape[3] == 64)
        on_head(std::integral_constant<int, 64>{});
    else
        on_head(std::integral_constant<int, 128>{});
}

int64_t attention_backward_mfma_workspace(const Call& call) {
    return call["B"] * call["NH"] * MfmaStatistics::padded(call["T"]) * 2 * 4;
}

template decltype(attention_backward_mfma<bf16>) attention_backward_mfma<bf16>;
template decltype(attention_backward_mfma<fp16>) attention_backward_mfma<fp16>;

}  // namespace llamac
#endif
