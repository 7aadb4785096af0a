// Attention backward for Hopper, variant `wgmma` of attention.hip. Calls that take turns (wgmma_backward.h) run
// wgmma_backward_turns.hip. Others run the two kernels of flash_backward.hip here, one that owns keys and one that owns queries, in
// the shape of wgmma_forward.hip: seven products, and each sum belongs to one warpgroup. A warpgroup's products run one after another
// on the tensor cores while it computes p and ds of finished ones; the last product of a step runs beside the first ones of the next.
//
// A block of keys walks over the queries that see one of them, and a block of queries over the keys that one of them sees.
// Neighboring queries see a key, as the first and the last key of a query never fall.
//
// The workspace: lse * log2 e and delta, f32[2,B,NH,T to whole blocks], infinity and 0 for queries that do not exist.
#include "ops/attention/wgmma_backward.h"

#if defined(LLAMAC_WARPGROUPS)
namespace llamac {
namespace {

constexpr int consumers = 2, rows = 64 * consumers;  // rows of a block
using Threads = Warpgroups<consumers>;

int64_t padded_time(int64_t time) {
    return (time + rows - 1) / rows * rows;
}

template <class E, int HD>
__global__ void __launch_bounds__(256)
    attention_backward_wgmma_kernel_statistics(float* scaled_lse, float* delta, View<const E, 4> dout,
                                               View<const E, 4> out, View<const float, 3> lse,
                                               int64_t padded) {
    constexpr int lanes = HD / vector_size<E>;
    const int64_t heads = out.shape[2];
    const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / lanes;  // of [B,padded,NH]
    const int64_t b = i / heads / padded, t = i / heads % padded, h = i % heads;
    const bool inside = b < out.shape[0] && t < out.shape[1];
    const float sum = row_delta<HD>(dout, out, b, t, h, inside);
    if (b >= out.shape[0] || static_cast<int>(threadIdx.x) % lanes != 0) return;
    delta[(b * heads + h) * padded + t] = sum;
    scaled_lse[(b * heads + h) * padded + t] = inside ? lse(b, h, t) * log2_e : INFINITY;
}

// ---- keys: s' = k q', dp' = v dout', dv += p' dout, dk += ds' q

// Queries a step: with 128 columns the sums leave no room for more; with 64, 128 queries spill and are slower.
constexpr int step = 64;
template <class E, int HD>
struct Keys {
    static constexpr int stages = 3;
    Panels<E, HD, rows> k, v;
    Panels<E, HD, step> q[stages], dout[stages];
    alignas(16) float lse[stages][step], delta[stages][step];
    SharedBarrier own_full;
    Pipeline<stages, consumers> pipeline;

    // The steps of a block that begins at key `key`: the queries that see one of its keys, head after head.
    struct Steps {
        int first, a_head;
        __device__ Steps(const auto& sight, int key) {
            first = sight.first_query(key) / step * step;
            a_head = larger(0, (sight.queries_until(key + rows - 1) - first + step - 1) / step);
        }
        __device__ int head(int n) const { return n / a_head; }
        __device__ int query(int n) const { return first + n % a_head * step; }
    };
};
// ---- queries: s = q k', dp = dout v', dq += ds k

template <class E, int HD>
struct Queries {
    static constexpr int stages = 2;
    Panels<E, HD, rows> q, dout, k[stages], v[stages];
    SharedBarrier own_full;
    Pipeline<stages, consumers> of_k, of_v;
};

#if defined(LLAMAC_WARPGROUP_CODE)
template <class E, int HD>
__device__ void copy_queries(Keys<E, HD>& shared, const TensorMap& q, const TensorMap& dout,
                             const TensorMap& k, const TensorMap& v, const float* lse, const float* delta,
                             const auto& sight, const BlockTile& tile, int64_t heads, int group,
                             int64_t padded) {
    using C = Keys<E, HD>;
    const int first = static_cast<int>(tile.block) * rows;
    shared.own_full.arrive_expecting(shared.k.bytes + shared.v.bytes);
    load_rows(shared.k, k, shared.own_full, first, tile.head, tile.batch);
    load_rows(shared.v, v, shared.own_full, first, tile.head, tile.batch);
    const typename C::Steps steps(sight, first);
    for (int n = 0; n < group * steps.a_head; n++) {
        const Stage<C::stages> stage(n);
        SharedBarrier& full = shared.pipeline.full[stage.index];
        const int64_t head = tile.head * group + steps.head(n);
        const int t0 = steps.query(n);
        shared.pipeline.free[stage.index].wait(stage.phase ^ 1);
        full.arrive_expecting(2 * shared.q[0].bytes + 2 * step * 4);
        load_rows(shared.q[stage.index], q, full, t0, head, tile.batch);
        load_rows(shared.dout[stage.index], dout, full, t0, head, tile.batch);
        const int64_t at = (tile.batch * heads + head) * padded + t0;
        load_bytes(shared.lse[stage.index], lse + at, step * 4, full);
        load_bytes(shared.delta[stage.index], delta + at, step * 4, full);
    }
}

template <class E, int HD>
__device__ void compute_keys(Keys<E, HD>& shared, View<E, 4>& dk, View<E, 4>& dv, const auto& sight,
                             const BlockTile& tile, int group, float scale) {
    using C = Keys<E, HD>;
    const Consumer consumer;
    const int block = static_cast<int>(tile.block) * rows, first = block + consumer.index * 64;
    const typename C::Steps steps(sight, block);
    SeenColumns own;
    own.of_keys(sight, first, consumer);
    float sum_k[HD / 2] = {}, sum_v[HD / 2] = {}, s[step / 2], dp[step / 2];
    uint32_t p[step / 16][4], ds[step / 16][4];
    operand_fence(sum_k);
    operand_fence(sum_v);
    shared.own_full.wait(0);
    for (int n = 0; n < group * steps.a_head; n++) {
        const Stage<C::stages> stage(n), last(n - 1);
        const int t0 = steps.query(n);
        shared.pipeline.full[stage.index].wait(stage.phase);
        warpgroup_arrive();
        begin_rows_product(s, shared.k, consumer.index * 64, shared.q[stage.index]);
        // For the step before: its operand leaves the registers that dp's sums take. Short of them, ptxas would run
        // all products one after another, with a line of information.
        warpgroup_wait<1>();
        operand_fence(sum_k);
        operand_fence(sum_v);
        if (n > 0) shared.pipeline.free[last.index].arrive();
        warpgroup_arrive();
        begin_rows_product(dp, shared.v, consumer.index * 64, shared.dout[stage.index]);
        warpgroup_wait<1>();
        operand_fence(s);
#pragma unroll
        for (int i = 0; i < step / 2; i += 4) {
            const int column = i / 4 * 8 + consumer.column;
            const float2 shift = *reinterpret_cast<const float2*>(shared.lse[stage.index] + column);
            s[i] = fast_exp2(fmaf(s[i], scale * log2_e, -shift.x));
            s[i + 1] = fast_exp2(fmaf(s[i + 1], scale * log2_e, -shift.y));
            s[i + 2] = fast_exp2(fmaf(s[i + 2], scale * log2_e, -shift.x));
            s[i + 3] = fast_exp2(fmaf(s[i + 3], scale * log2_e, -shift.y));
        }
        own.hide(s, t0, 0);
        pack<E>(p, s);
        warpgroup_arrive();
        begin_columns_product(sum_v, p, shared.dout[stage.index]);
        warpgroup_wait<1>();
        operand_fence(dp);
#pragma unroll
        for (int i = 0; i < step / 2; i += 4) {
            const int column = i / 4 * 8 + consumer.column;
            const float2 d = *reinterpret_cast<const float2*>(shared.delta[stage.index] + column);
            dp[i] = s[i] * (dp[i] - d.x);
            dp[i + 1] = s[i + 1] * (dp[i + 1] - d.y);
            dp[i + 2] = s[i + 2] * (dp[i + 2] - d.x);
            dp[i + 3] = s[i + 3] * (dp[i + 3] - d.y);
        }
        pack<E>(ds, dp);
        warpgroup_arrive();
        begin_columns_product(sum_k, ds, shared.q[stage.index]);
    }
    warpgroup_wait<0>();
    operand_fence(sum_k);
    operand_fence(sum_v);
    const int valid = sight.keys - first, width = static_cast<int>(dk.shape[3]);
    store_product(row_of(dk, tile.batch, first, tile.head), dk.stride[1], sum_k, {scale, scale}, shared.k,
                  consumer, valid, width);
    store_product(row_of(dv, tile.batch, first, tile.head), dv.stride[1], sum_v, {1, 1}, shared.v, consumer,
                  valid, width);
}

// The keys that a block of queries sees: blocks of them, the last first.
struct KeyBlocks {
    int first, count;

    __device__ KeyBlocks(const auto& sight, int block) {
        first = sight.begin(block * rows) / rows;
        count = (sight.end(block * rows + rows - 1) + rows - 1) / rows - first;
    }
    __device__ int key(int n) const { return (first + count - 1 - n) * rows; }
};

template <class E, int HD>
__device__ void copy_keys(Queries<E, HD>& shared, const TensorMap& q, const TensorMap& dout,
                          const TensorMap& k, const TensorMap& v, const auto& sight, int block,
                          const BlockTile& tile, int64_t key_head) {
    using C = Queries<E, HD>;
    shared.own_full.arrive_expecting(shared.q.bytes + shared.dout.bytes);
    load_rows(shared.q, q, shared.own_full, block * rows, tile.head, tile.batch);
    load_rows(shared.dout, dout, shared.own_full, block * rows, tile.head, tile.batch);
    const KeyBlocks steps(sight, block);
    const auto load = [&](Panels<E, HD, rows>(&to)[C::stages], const TensorMap& map,
                          Pipeline<C::stages, consumers>& pipeline, int n) {
        const Stage<C::stages> stage(n);
        pipeline.free[stage.index].wait(stage.phase ^ 1);
        pipeline.full[stage.index].arrive_expecting(to[stage.index].bytes);
        load_rows(to[stage.index], map, pipeline.full[stage.index], steps.key(n), key_head, tile.batch);
    };
    for (int n = 0; n < steps.count; n++) {
        load(shared.k, k, shared.of_k, n);
        load(shared.v, v, shared.of_v, n);
    }
}

template <class E, int HD>
__device__ void compute_queries(Queries<E, HD>& shared, View<E, 4>& dq, const float* lse, const float* delta,
                                const auto& sight, int block, const BlockTile& tile, int64_t padded,
                                float scale) {
    using C = Queries<E, HD>;
    const Consumer consumer;
    const int first = block * rows + consumer.index * 64;
    const int64_t at = (tile.batch * dq.shape[2] + tile.head) * padded + first + consumer.row;
    const float shift[2] = {lse[at], lse[at + 8]}, d[2] = {delta[at], delta[at + 8]};
    float sum[HD / 2] = {}, s[rows / 2], dp[rows / 2];
    uint32_t ds[rows / 16][4];
    operand_fence(sum);
    shared.own_full.wait(0);
    const KeyBlocks steps(sight, block);
    SeenColumns own;
    own.of_queries(sight, first, consumer);
    for (int n = 0; n < steps.count; n++) {
        const Stage<C::stages> stage(n), last(n - 1);
        shared.of_k.full[stage.index].wait(stage.phase);
        shared.of_v.full[stage.index].wait(stage.phase);
        warpgroup_arrive();
        begin_rows_product(s, shared.q, consumer.index * 64, shared.k[stage.index]);
        warpgroup_wait<1>();  // as above
        operand_fence(sum);
        if (n > 0) shared.of_k.free[last.index].arrive_as_warp();
        warpgroup_arrive();
        begin_rows_product(dp, shared.dout, consumer.index * 64, shared.v[stage.index]);
        warpgroup_wait<1>();
        operand_fence(s);
#pragma unroll
        for (int i = 0; i < rows / 2; i++) s[i] = fast_exp2(fmaf(s[i], scale * log2_e, -shift[i / 2 % 2]));
        own.hide(s, steps.key(n), 0);
        warpgroup_wait<0>();
        operand_fence(dp);
        shared.of_v.free[stage.index].arrive_as_warp();
#pragma unroll
        for (int i = 0; i < rows / 2; i++) dp[i] = s[i] * (dp[i] - d[i / 2 % 2]);
        pack<E>(ds, dp);
        warpgroup_arrive();
        begin_columns_product(sum, ds, shared.k[stage.index]);
    }
    warpgroup_wait<0>();
    operand_fence(sum);
    store_product(row_of(dq, tile.batch, first, tile.head), dq.stride[1], sum, {scale, scale}, shared.q,
                  consumer, sight.queries - first, static_cast<int>(dq.shape[3]));
}
#endif

template <class E, int HD, Masks kind>
__global__ void __launch_bounds__(Threads::threads, 1)
    attention_backward_wgmma_kernel_keys(View<E, 4> dk, View<E, 4> dv, AttentionMask visible,
                                         LLAMAC_KERNEL_CONSTANT const TensorMap dout,
                                         LLAMAC_KERNEL_CONSTANT const TensorMap q,
                                         LLAMAC_KERNEL_CONSTANT const TensorMap k,
                                         LLAMAC_KERNEL_CONSTANT const TensorMap v, const float* lse,
                                         const float* delta, int group, int64_t padded, float scale) {
#if defined(LLAMAC_WARPGROUP_CODE)
    Keys<E, HD>& shared = aligned_shared_memory<Keys<E, HD>>();
    if (threadIdx.x == 0) {
        shared.own_full.init(1);
        shared.pipeline.init(shared.pipeline.threads);
        fence_barrier_init();
    }
    __syncthreads();
    const BlockTile tile =
        block_tile_of((dk.shape[1] + rows - 1) / rows, dk.shape[2]);  // more queries come first
    const SequenceMask<kind> sight(visible, tile.batch);
    if (threadIdx.x < warpgroup_size) {
        warpgroup_release_registers<Threads::producer_registers>();
        if (threadIdx.x == 0)
            copy_queries(shared, q, dout, k, v, lse, delta, sight, tile, dk.shape[2] * group, group, padded);
    } else {
        warpgroup_acquire_registers<Threads::consumer_registers>();
        compute_keys(shared, dk, dv, sight, tile, group, scale);
    }
#endif
}

template <class E, int HD, Masks kind>
__global__ void __launch_bounds__(Threads::threads, 1)
    attention_backward_wgmma_kernel_queries(View<E, 4> dq, AttentionMask visible,
                                            LLAMAC_KERNEL_CONSTANT const TensorMap dout,
                                            LLAMAC_KERNEL_CONSTANT const TensorMap q,
                                            LLAMAC_KERNEL_CONSTANT const TensorMap k,
                                            LLAMAC_KERNEL_CONSTANT const TensorMap v, const float* lse,
                                            const float* delta, int group, int64_t padded, float scale) {
#if defined(LLAMAC_WARPGROUP_CODE)
    Queries<E, HD>& shared = aligned_shared_memory<Queries<E, HD>>();
    if (threadIdx.x == 0) {
        shared.own_full.init(1);
        shared.of_k.init(shared.of_k.warps);
        shared.of_v.init(shared.of_v.warps);
        fence_barrier_init();
    }
    __syncthreads();
    const int blocks = static_cast<int>((dq.shape[1] + rows - 1) / rows);
    const BlockTile tile = block_tile_of(blocks, dq.shape[2]);
    const int block = blocks - 1 - static_cast<int>(tile.block);  // more keys come first
    const SequenceMask<kind> sight(visible, tile.batch);
    if (threadIdx.x < warpgroup_size) {
        warpgroup_release_registers<Threads::producer_registers>();
        if (threadIdx.x == 0) copy_keys(shared, q, dout, k, v, sight, block, tile, tile.head / group);
    } else {
        warpgroup_acquire_registers<Threads::consumer_registers>();
        compute_queries(shared, dq, lse, delta, sight, block, tile, padded, scale);
    }
#endif
}

template <class E, int HD, Masks kind>
void launch_masked(View<E, 4> dq, View<E, 4> dk, View<E, 4> dv, View<const E, 4> dout, View<const E, 4> q,
                   View<const E, 4> k, View<const E, 4> v, const AttentionMask& visible,
                   const Statistics& statistics, float scale, hipStream_t stream) {
    const int64_t B = q.shape[0], NH = q.shape[2], NKV = k.shape[2], padded = statistics.padded;
    const int group = static_cast<int>(NH / NKV);
    launch(Grid(blocks_for(padded_time(k.shape[1]) / rows * NKV * B, 1), Threads::threads, stream,
                aligned_shared_bytes<Keys<E, HD>>),
           attention_backward_wgmma_kernel_keys<E, HD, kind>, dk, dv, visible, map_of(dout, step),
           map_of(q, step), map_of(k, rows), map_of(v, rows), statistics.lse, statistics.delta, group, padded,
           scale);
    launch(Grid(blocks_for(padded / rows * NH * B, 1), Threads::threads, stream,
                aligned_shared_bytes<Queries<E, HD>>),
           attention_backward_wgmma_kernel_queries<E, HD, kind>, dq, visible, map_of(dout, rows),
           map_of(q, rows), map_of(k, rows), map_of(v, rows), statistics.lse, statistics.delta, group, padded,
           scale);
}

template <class E>
void attention_backward_wgmma(View<E, 4> dq, View<E, 4> dk, View<E, 4> dv, View<const E, 4> dout,
                              View<const E, 4> out, View<const float, 3> lse, View<const E, 4> q,
                              View<const E, 4> k, View<const E, 4> v, View<const int32_t, 2> first,
                              View<const int32_t, 2> ends, double scale, bool causal, int64_t window,
                              LaunchContext context) {
    const AttentionMask visible(q, k, first, ends, causal, window);
    on_heads(visible, q, [&](auto head, auto masks) {
        constexpr int HD = decltype(head)::value;
        constexpr Masks kind = decltype(masks)::value;
        const int64_t B = q.shape[0], NH = q.shape[2], padded = padded_time(q.shape[1]);
        float *const scaled_lse = static_cast<float*>(context.workspace), *const delta =
                                                                              scaled_lse + B * NH * padded;
        launch(Grid(blocks_for(B * padded * NH * (HD / vector_size<E>), 256), 256, context.stream),
               attention_backward_wgmma_kernel_statistics<E, HD>, scaled_lse, delta, dout, out, lse, padded);
        const Statistics statistics{scaled_lse, delta, padded};
        const bool in_turns = q.shape[3] == HD && takes_turns(visible.queries, visible.keys, visible.first,
                                                              visible.ends, causal, window);
        if constexpr (kind != no_masks)
            if (!in_turns)
                return launch_masked<E, HD, kind>(dq, dk, dv, dout, q, k, v, visible, statistics,
                                                  static_cast<float>(scale), context.stream);
        attention_backward_wgmma_turns(dq, dk, dv, dout, q, k, v, statistics, static_cast<float>(scale),
                                       causal, delta + B * NH * padded, context.stream);
    });
}

int64_t attention_backward_wgmma_workspace(const Call& call) {
    const int64_t queries = call["B"] * call["NH"] * padded_time(call["T"]), HD = call["HD"];
    const bool in_turns =
        takes_turns(call["T"], call["S"], call.operand("first").data, call.operand("end").data,
                    call.number("causal") != 0, static_cast<int64_t>(call.number("window"))) &&
        (HD == 64 || HD == 128);
    return 2 * queries * 4 + (in_turns ? attention_backward_wgmma_turns_bytes(queries, HD) : 0);
}

}  // namespace

Variant wgmma_attention_backward() {
    return {
        .name = "wgmma",
        .idea = "with wgmma and TMA; without masks in one pass, dq added in turns",
        .instantiations = instantiations<attention_backward_wgmma<bf16>, attention_backward_wgmma<fp16>>(),
        .supports = wgmma_constraints,
        .workspace = attention_backward_wgmma_workspace,
        .chip = wgmma_chip};
}

}  // namespace llamac
#endif
