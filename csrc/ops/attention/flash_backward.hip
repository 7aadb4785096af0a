// Attention backward on matrix cores (Dao 2023, FlashAttention-2), variant `flash` of attention.hip. The scores are recomputed from
// q, k and lse by two kernels, one after the other:
//
//   keys      a block owns rows of k and v and walks over the queries that see them, through all query heads
//             that share them: s' = k q', dp' = v dout', dv += p' dout, dk += ds' q
//   queries   a block owns rows of q and dout and walks over the keys that they see: s = q k', dp = dout v',
//             dq += ds k
//
// with c = scale * log2 e, p = 2^(c s - lse * log2 e), ds = p (dp - delta). Seven products instead of the five of one pass, but
// every sum is one warp's own, in the same order in every run, and p and ds go straight from accumulators to operands. The
// workspace is delta, f32[B,NH,T].
//
// With masks the walks leave out keys that no query of the block sees, and queries that see no key of it, as in
// flash_forward.hip; the keys' kernel finds the last query that sees one of its keys by bisection.
#include "ops/attention/attention.h"
#include "ops/attention/flash.h"

namespace llamac {
namespace {

using T = Tile;

// A number as it is; any NaN as the one that stays one in an operand. Those are rounded by adding to the bits that are
// cut, which makes zeros of the last NaNs, the ones that memory is filled with before it is written.
__device__ inline float same_nan(float x) {
    return x == x ? x : NAN;
}

template <class M>
constexpr bool small = std::is_same_v<M, Wmma>;  // half the registers
template <class M>
constexpr bool mma_sync = std::is_same_v<M, MmaSync>;

// A block's `rows` of two tensors, and `step` rows a step of the two that it walks over, in two stages: one is
// filled while the other is used. mine: rows a warp.
template <int HD, int rows_, int step_, int mine_, class M>
struct Walk {
    static constexpr int R = 16, rows = rows_, step = step_, warp_rows = mine_;
    static constexpr int row_tiles = warp_rows / R, step_tiles = step / R, head_tiles = HD / R;
    static constexpr int warps = rows / warp_rows, threads = warps * M::warp;
    static constexpr int row_bytes = rows * HD * 2, step_bytes = step * HD * 2;
    // Where operands go to registers the rows come through the steps' place, one tensor after the other.
    static constexpr int second_at = M::operands_in_registers ? 0 : row_bytes, steps_at = 2 * second_at;
    static constexpr int tiles_end = steps_at + 4 * step_bytes;
    static_assert(tiles_end >= row_bytes);
};

// The keys' kernel holds two sums a warp: with heads of 128 that leaves room for 16 rows. WMMA has half the
// room. On NVIDIA two blocks of 64 rows serve heads of 128 better than one of 128.
template <int HD, class M>
constexpr int keys_of_warp = HD == 64 && !small<M> ? 32 : 16;
template <int HD, class M>
constexpr int keys_of_block = small<M> || (HD == 128 && mma_sync<M>) ? 64 : 128;
template <int HD, class M>
constexpr int keys_step = small<M>                   ? 16
                          : HD == 128 && mma_sync<M> ? 64
                                                     : 32;
template <int HD, class M = Machine>
struct Keys : Walk<HD, keys_of_block<HD, M>, keys_step<HD, M>, keys_of_warp<HD, M>, M> {};

template <int HD, class M>
constexpr int queries_step = small<M>                  ? 16
                             : HD == 64 && mma_sync<M> ? 64
                                                       : 32;
template <int HD, class M = Machine>
struct Queries : Walk<HD, small<M> ? 64 : 128, queries_step<HD, M>, small<M> ? 16 : 32, M> {};

template <class E, int HD>
__global__ void __launch_bounds__(256)
    attention_backward_flash_kernel_delta(float* delta, View<const E, 4> dout, View<const E, 4> out) {
    constexpr int lanes = HD / vector_size<E>;
    const int64_t time = out.shape[1], heads = out.shape[2];
    const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / lanes;  // of [B,T,NH]
    const int64_t b = i / heads / time, t = i / heads % time, h = i % heads;
    const bool inside = b < out.shape[0];
    const float sum = row_delta<HD>(dout, out, b, t, h, inside);
    if (inside && static_cast<int>(threadIdx.x) % lanes == 0) delta[(b * heads + h) * time + t] = sum;
}

// The rows that the block owns, of two tensors, taken by its warps.
template <class C, class E, int HD>
__device__ void take_rows(WarpRows<T, HD, C::row_tiles>& first, const E* first_rows, int64_t first_stride,
                          WarpRows<T, HD, C::row_tiles>& second, const E* second_rows, int64_t second_stride,
                          int valid, int width) {
    const int row = warp_index() * C::warp_rows;
    const SharedTile<HD> shared_first{dynamic_shared_memory()},
        shared_second{dynamic_shared_memory() + C::second_at};
    TileCopy<C::rows, HD, C::threads> copy;
    copy.begin(shared_first, first_rows, first_stride, valid, width);
    copy.end();
    if (C::second_at == 0) {
        __syncthreads();
        first.take(shared_first, row);
        __syncthreads();
    }
    copy.begin(shared_second, second_rows, second_stride, valid, width);
    copy.end();
    __syncthreads();
    if (C::second_at != 0) first.take(shared_first, row);
    second.take(shared_second, row);
    __syncthreads();
}

// A sum of a block's rows, scaled, rounded and stored. All warps are done with LDS, and are again after it.
template <class C, int HD, class E>
__device__ void store_sum(E* to, int64_t stride, T::Accumulator (&sum)[C::row_tiles][C::head_tiles],
                          float scale, int valid, int width) {
    const SharedTile<HD> shared{dynamic_shared_memory()};
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++) {
#pragma unroll
        for (int n = 0; n < C::head_tiles; n++)
#pragma unroll
            for (int i = 0; i < T::elements; i++) sum[r][n].x[i] *= scale;
        T::store_rows<E>(shared, warp_index() * C::warp_rows + r * C::R, sum[r]);
    }
    __syncthreads();
    store_tile<C::rows, HD, C::threads>(to, stride, shared, valid, width);
    __syncthreads();
}

// lse and delta of a step's queries, and with masks which keys they see (SequenceMask), in LDS beside the tiles.
template <class C, bool masked>
struct Statistics {
    float lse[C::step], delta[C::step];
};
template <class C>
struct Statistics<C, true> : Statistics<C, false> {
    int begin[C::step], end[C::step];
};

// For a step, whose first query is `query`, and the warp's keys from `key` on: dv += p' dout, and ds'.
template <class E, class C, bool masked, int HD>
__device__ Packed<T, E, C::row_tiles, C::step_tiles> add_values(
    T::Accumulator (&sum_v)[C::row_tiles][C::head_tiles], const WarpRows<T, HD, C::row_tiles>& rows_k,
    const WarpRows<T, HD, C::row_tiles>& rows_v, SharedTile<HD> shared_q, SharedTile<HD> shared_dout,
    const Statistics<C, masked>& of_step, int query, int key, float scale) {
    T::Accumulator p[C::row_tiles][C::step_tiles] = {}, dp[C::row_tiles][C::step_tiles] = {};
    add_rows_product<T, E>(p, rows_k, shared_q);
    if constexpr (masked) {
        const int *const begin = of_step.begin, *const end = of_step.end;
        // No ||: the product would move behind its branch, and hold the registers of all its operands until there.
        if ((begin[C::step - 1] > key) | (end[0] < key + C::warp_rows)) mask_unseen<T>(p, key, begin, end);
    } else if (query - key < C::warp_rows - 1) {
        mask<T, Masked::columns_before>(p, query - key);
    }
#pragma unroll
    for (int m = 0; m < C::step_tiles; m++)
#pragma unroll
        for (int i = 0; i < T::elements; i++) {
            const float shift = of_step.lse[m * C::R + T::column(i)];
#pragma unroll
            for (int r = 0; r < C::row_tiles; r++)
                p[r][m].x[i] = fast_exp2(fmaf(p[r][m].x[i], scale * log2_e, -shift));
        }
    add_columns_product<T>(sum_v, Packed<T, E, C::row_tiles, C::step_tiles>(p), shared_dout);
    add_rows_product<T, E>(dp, rows_v, shared_dout);
#pragma unroll
    for (int m = 0; m < C::step_tiles; m++)
#pragma unroll
        for (int i = 0; i < T::elements; i++) {
            const float d = of_step.delta[m * C::R + T::column(i)];
#pragma unroll
            for (int r = 0; r < C::row_tiles; r++) dp[r][m].x[i] = p[r][m].x[i] * (dp[r][m].x[i] - d);
        }
    return Packed<T, E, C::row_tiles, C::step_tiles>(dp);
}

template <class E, int HD, Masks kind>
__global__ void __launch_bounds__(Keys<HD>::threads) LLAMAC_WAVES_A_SIMD(2)
    attention_backward_flash_kernel_keys(View<E, 4> dk, View<E, 4> dv, View<const E, 4> dout,
                                         const float* lse, const float* delta, View<const E, 4> q,
                                         View<const E, 4> k, View<const E, 4> v, AttentionMask visible,
                                         float scale) {
    using C = Keys<HD>;
    constexpr bool masked = kind != no_masks;
    const int time = static_cast<int>(q.shape[1]),
              group = static_cast<int>(q.shape[2]) / static_cast<int>(k.shape[2]);
    const int seen = masked ? static_cast<int>(k.shape[1]) : time;
    const int width = masked ? static_cast<int>(q.shape[3]) : HD;
    const BlockTile tile = block_tile_of((seen + C::rows - 1) / C::rows, k.shape[2]);
    const SequenceMask<kind> sight(visible, tile.batch, time, seen);
    const int first = static_cast<int>(tile.block) * C::rows;  // more queries come first
    const int row = first + warp_index() * C::warp_rows;
    char* const steps = dynamic_shared_memory() + C::steps_at;
    auto* const statistics = reinterpret_cast<Statistics<C, masked>*>(dynamic_shared_memory() + C::tiles_end);

    WarpRows<T, HD, C::row_tiles> rows_k, rows_v;
    take_rows<C>(rows_k, row_of(k, tile.batch, first, tile.head), k.stride[1], rows_v,
                 row_of(v, tile.batch, first, tile.head), v.stride[1], seen - first, width);
    T::Accumulator sum_k[C::row_tiles][C::head_tiles] = {}, sum_v[C::row_tiles][C::head_tiles] = {};

    TileCopy<C::step, HD, C::threads> copy_q, copy_dout;
    // The queries of a step: from t0 on, of a head of the group. They follow one another through all its heads.
    struct Step {
        int head, t0;
    };
    const int start = (masked ? sight.first_query(first) : first) / C::step * C::step;
    const int end = masked ? sight.queries_until(smaller(first + C::rows, seen) - 1) : time;
    const auto after = [&](Step step) {
        const bool last = step.t0 + C::step >= end;
        return Step{step.head + last, last ? start : step.t0 + C::step};
    };
    float next_lse = 0, next_delta = 0;
    int next_begin = 0, next_end = 0;
    const int64_t statistics_at = (tile.batch * q.shape[2] + tile.head * group) * time;
    const auto begin_step = [&](Step step, int n) {
        const int64_t head = tile.head * group + step.head;
        const int t0 = step.t0, mine = static_cast<int>(threadIdx.x);
        char* const stage = steps + n % 2 * 2 * C::step_bytes;
        copy_q.begin(SharedTile<HD>{stage}, row_of(q, tile.batch, t0, head), q.stride[1], time - t0, width);
        copy_dout.begin(SharedTile<HD>{stage + C::step_bytes}, row_of(dout, tile.batch, t0, head),
                        dout.stride[1], time - t0, width);
        // Queries that do not exist get p = 2^-inf.
        const bool exists = mine < C::step && t0 + mine < time;
        const int64_t at = statistics_at + int64_t{step.head} * time + t0 + mine;
        next_lse = exists ? lse[at] : INFINITY;  // used a step later: nothing waits for it here
        next_delta = exists ? delta[at] : 0;
        if constexpr (masked) next_begin = sight.begin(t0 + mine), next_end = sight.end(t0 + mine);
    };
    Step now{masked && start >= end ? group : 0, start};  // no query sees the keys
    if (!masked || now.head < group) begin_step(now, 0);
    for (int n = 0; now.head < group; n++) {
        copy_q.end();
        copy_dout.end();
        auto& of_step = statistics[n % 2];
        if (static_cast<int>(threadIdx.x) < C::step) {
            of_step.lse[threadIdx.x] = same_nan(next_lse) * log2_e,
            of_step.delta[threadIdx.x] = same_nan(next_delta);
            if constexpr (masked)
                of_step.begin[threadIdx.x] = next_begin, of_step.end[threadIdx.x] = next_end;
        }
        __syncthreads();  // the step's tiles are there, the others are read
        const int t0 = now.t0;
        now = after(now);
        if (now.head < group) begin_step(now, n + 1);

        const SharedTile<HD> shared_q{steps + n % 2 * 2 * C::step_bytes},
            shared_dout{shared_q.data + C::step_bytes};
        // All before the warp's keys, or all behind the queries that see them.
        if constexpr (masked) {
            if ((of_step.end[C::step - 1] <= row) | (of_step.begin[0] >= row + C::warp_rows)) continue;
        } else if (t0 + C::step <= row) {
            continue;
        }
        const auto ds =
            add_values<E, C, masked>(sum_v, rows_k, rows_v, shared_q, shared_dout, of_step, t0, row, scale);
        add_columns_product<T>(sum_k, ds, shared_q);
    }
    __syncthreads();
    store_sum<C, HD>(row_of(dk, tile.batch, first, tile.head), dk.stride[1], sum_k, scale, seen - first,
                     width);
    store_sum<C, HD>(row_of(dv, tile.batch, first, tile.head), dv.stride[1], sum_v, 1, seen - first, width);
}

template <class E, int HD, Masks kind>
__global__ void __launch_bounds__(Queries<HD>::threads) LLAMAC_WAVES_A_SIMD(2)
    attention_backward_flash_kernel_queries(View<E, 4> dq, View<const E, 4> dout, const float* lse,
                                            const float* delta, View<const E, 4> q, View<const E, 4> k,
                                            View<const E, 4> v, AttentionMask visible, float scale) {
    using C = Queries<HD>;
    constexpr bool masked = kind != no_masks;
    const int time = static_cast<int>(q.shape[1]), blocks = (time + C::rows - 1) / C::rows;
    const int seen = masked ? static_cast<int>(k.shape[1]) : time;
    const int width = masked ? static_cast<int>(q.shape[3]) : HD;
    const BlockTile tile = block_tile_of(blocks, q.shape[2]);
    const int first = (blocks - 1 - static_cast<int>(tile.block)) * C::rows;  // more keys come first
    const int row = first + warp_index() * C::warp_rows;
    const int64_t key_head = tile.head / (q.shape[2] / k.shape[2]);
    char* const steps = dynamic_shared_memory() + C::steps_at;

    WarpRows<T, HD, C::row_tiles> rows_q, rows_dout;
    take_rows<C>(rows_q, row_of(q, tile.batch, first, tile.head), q.stride[1], rows_dout,
                 row_of(dout, tile.batch, first, tile.head), dout.stride[1], time - first, width);
    float row_lse[C::row_tiles][T::slots], row_delta[C::row_tiles][T::slots];
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++)
#pragma unroll
        for (int slot = 0; slot < T::slots; slot++) {
            const int t = row + r * C::R + T::row(slot);
            const int64_t at = (tile.batch * q.shape[2] + tile.head) * time + t;
            row_lse[r][slot] = t < time ? same_nan(lse[at]) * log2_e : INFINITY;
            row_delta[r][slot] = t < time ? same_nan(delta[at]) : 0;
        }
    T::Accumulator sum[C::row_tiles][C::head_tiles] = {};

    TileCopy<C::step, HD, C::threads> copy_k, copy_v;
    const SequenceMask<kind> sight(visible, tile.batch, time, seen);
    const WarpMask own(sight, row, C::warp_rows);
    const int until = time < first + C::rows ? time : first + C::rows;
    const int begin = masked ? sight.begin(first) / C::step * C::step : 0;
    const int end = masked ? sight.end(until - 1) : until;
    const auto begin_step = [&](int s0) {
        char* const stage = steps + s0 / C::step % 2 * 2 * C::step_bytes;
        copy_k.begin(SharedTile<HD>{stage}, row_of(k, tile.batch, s0, key_head), k.stride[1], seen - s0,
                     width);
        copy_v.begin(SharedTile<HD>{stage + C::step_bytes}, row_of(v, tile.batch, s0, key_head), v.stride[1],
                     seen - s0, width);
    };
    begin_step(begin);
    for (int s0 = begin; s0 < end; s0 += C::step) {
        copy_k.end();
        copy_v.end();
        __syncthreads();  // the step's tiles are there, the others are read
        if (s0 + C::step < end) begin_step(s0 + C::step);
        if (masked ? !own.any(s0, C::step) : s0 >= row + C::warp_rows)
            continue;  // the warp's queries see nothing

        const SharedTile<HD> shared_k{steps + s0 / C::step % 2 * 2 * C::step_bytes},
            shared_v{shared_k.data + C::step_bytes};
        T::Accumulator p[C::row_tiles][C::step_tiles] = {}, dp[C::row_tiles][C::step_tiles] = {};
        add_rows_product<T, E>(p, rows_q, shared_k);
        if constexpr (masked) {
            if (!own.all(s0, C::step)) mask_unseen<T>(p, sight, row, s0);
        } else if (s0 + C::step - 1 > row) {
            mask<T, Masked::columns_after>(p, s0 - row);
        }
        add_rows_product<T, E>(dp, rows_dout, shared_v);  // before the branch its operands would outlive it
#pragma unroll
        for (int r = 0; r < C::row_tiles; r++)
#pragma unroll
            for (int n = 0; n < C::step_tiles; n++)
#pragma unroll
                for (int i = 0; i < T::elements; i++) {
                    const int slot = T::slot(i);
                    const float x = fast_exp2(fmaf(p[r][n].x[i], scale * log2_e, -row_lse[r][slot]));
                    dp[r][n].x[i] = x * (dp[r][n].x[i] - row_delta[r][slot]);
                }
        add_columns_product<T>(sum, Packed<T, E, C::row_tiles, C::step_tiles>(dp), shared_k);
    }
    __syncthreads();
    store_sum<C, HD>(row_of(dq, tile.batch, first, tile.head), dq.stride[1], sum, scale, time - first, width);
}

template <int HD, class E>
void find_delta(float* delta, View<const E, 4> dout, View<const E, 4> out, const LaunchContext& context) {
    const int64_t vectors = out.shape[0] * out.shape[1] * out.shape[2] * (HD / vector_size<E>);
    launch(Grid(blocks_for(vectors, 256), 256, context.stream), attention_backward_flash_kernel_delta<E, HD>,
           delta, dout, out);
}
template <class C, class E>
unsigned blocks_of(const View<const E, 4>& rows) {
    return blocks_for((rows.shape[1] + C::rows - 1) / C::rows * rows.shape[2] * rows.shape[0], 1);
}

template <class E>
void attention_backward_flash(View<E, 4> dq, View<E, 4> dk, View<E, 4> dv, View<const E, 4> dout,
                              View<const E, 4> out, View<const float, 3> lse, View<const E, 4> q,
                              View<const E, 4> k, View<const E, 4> v, View<const int32_t, 2> first,
                              View<const int32_t, 2> ends, double scale_, bool causal, int64_t window,
                              LaunchContext context) {
    const float scale = static_cast<float>(scale_);
    const AttentionMask visible(q, k, first, ends, causal, window);
    float* const delta = static_cast<float*>(context.workspace);
    on_heads(visible, q, [&](auto head, auto masks) {
        constexpr int HD = decltype(head)::value;
        constexpr Masks kind = decltype(masks)::value;
        find_delta<HD>(delta, dout, out, context);
        on_machine([&](auto machine) {
            using OfKeys = Keys<HD, decltype(machine)>;
            using OfQueries = Queries<HD, decltype(machine)>;
            launch(Grid(blocks_of<OfKeys>(k), OfKeys::threads, context.stream,
                        OfKeys::tiles_end + 2 * sizeof(Statistics<OfKeys, kind != no_masks>)),
                   attention_backward_flash_kernel_keys<E, HD, kind>, dk, dv, dout, lse.data, delta, q, k, v,
                   visible, scale);
            launch(Grid(blocks_of<OfQueries>(q), OfQueries::threads, context.stream, OfQueries::tiles_end),
                   attention_backward_flash_kernel_queries<E, HD, kind>, dq, dout, lse.data, delta, q, k, v,
                   visible, scale);
        });
    });
}

}  // namespace

Variant flash_attention_backward() {
    return {
        .name = "flash",
        .idea = "tiles on matrix cores, p made again from lse, 128-bit accesses",
        .instantiations = instantiations<attention_backward_flash<bf16>, attention_backward_flash<fp16>>(),
        .supports = flash_constraints,
        .workspace = [](const Call& c) { return c["B"] * c["NH"] * c["T"] * 4; }};
}

}  // namespace llamac
