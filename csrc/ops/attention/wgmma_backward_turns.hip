// Attention backward for Hopper without masks, or where causal with a multiple of 128 keys before the queries (takes_turns()): one
// kernel of five products, deterministic. A block owns 128 keys of a key/value head and walks over the queries that see them, 64 a
// step. Four warpgroups:
//
//   helpers     one thread copies q and dout (TMA); one waits for the block's turns, one passes them on
//   two owners  64 keys each: s' = k q', dp' = v dout', dv += p' dout, dk += ds' q; ds' goes to LDS
//   the adder   dq of the step, += ds k over all keys of the block, added to the sums in memory
//
// Turns: the blocks of a head add to a step's sums of dq in the order of their keys, so that the bits are the same in every run.
// Waits are short: blocks begin in that order, all with the last queries, the heads of a group in the inner loop, so that a
// block reaches a step after the block before it. A block takes its place from a counter when it begins: the blocks that it
// waits for have begun before it.
//
// Cycles of a multiprocessor per step, HD 128: products 5 * 512, exponentials 512; LDS 2700 (products 2300, of which s and
// dp take all 128 bytes of a cycle, copies 256). Registers decide the order of an owner's products: ptxas runs products one
// after another unless a thread's sums and operands of them leave 24 registers and a few. With HD 128 the sums of s and dp share
// 32, p stays in 16 bits, and ds is read from LDS; with HD 64 all have their own. Experiments: docs/log/attention.md.
#include "ops/attention/wgmma_backward.h"

#if defined(LLAMAC_WARPGROUPS)
namespace llamac {
namespace {

constexpr int owners = 2, rows = 64 * owners, step = 64;
static_assert(rows == keys_per_turn);
// Registers of a thread of each warpgroup; together those that four warpgroups begin with.
constexpr int helper_registers = 24, owner_registers = 208, adder_registers = 72;
static_assert(helper_registers + owners * owner_registers + adder_registers == 4 * 128);
constexpr int helpers = 0, first_owner = 1, adder = first_owner + owners, warpgroups = adder + 1;

template <class E, int HD>
struct Shared {
    static constexpr int stages = 3, ds_stages = 2;
    Panels<E, HD, rows> k, v;
    Panels<E, HD, step> q[stages], dout[stages];
    Panels<E, step, rows> ds[ds_stages];
    alignas(16) float lse[stages][step], delta[stages][step];
    // Barriers of q and dout, whose stages are free when a later step's ds is full; of ds; of the adder's turn.
    SharedBarrier own_full, full[stages], ds_full[ds_stages], ds_free[ds_stages];
    SharedBarrier turn_come[ds_stages], added[ds_stages], turn_over[ds_stages];
    int block, head, batch;  // the block's keys
};

// Which queries see a block's keys: all; those from the block's own on; the same of a piece, whose queries are behind other keys. A
// piece has kernels of its own, so that the loops of the others do not count these keys.
enum class SeenBy { all, later, later_of_piece };

#if defined(LLAMAC_WARPGROUP_CODE)
// A block's steps: the last queries first, all heads of the group, down to the block's own queries or, where not causal, the first.
// before: keys before the first query's own.
template <SeenBy seen_by>
struct Steps {
    int count, query, head = 0, group;
    __device__ Steps(int queries, int before, int block, int group_)
        : query((queries - 1) / step * step), group(group_) {
        const int first = seen_by == SeenBy::all     ? 0
                          : seen_by == SeenBy::later ? block * rows
                                                     : max(block * rows - before, 0);
        count = ((query - first) / step + 1) * group;
    }
    __device__ void next() {
        if (++head < group) return;
        head = 0, query -= step;
    }
};

template <SeenBy seen_by, class E, int HD>
__device__ void copy(Shared<E, HD>& shared, const TensorMap& q, const TensorMap& dout, const TensorMap& k,
                     const TensorMap& v, const Statistics& statistics, int queries, int before, int group,
                     int heads) {
    const int block = shared.block, head = shared.head, batch = shared.batch;
    Steps<seen_by> steps(queries, before, block, group);
    const auto load = [&](int stage) {
        SharedBarrier& full = shared.full[stage];
        const int query_head = head * group + steps.head;
        full.arrive_expecting(2 * shared.q[0].bytes + 2 * step * 4);
        load_rows(shared.q[stage], q, full, steps.query, query_head, batch);
        load_rows(shared.dout[stage], dout, full, steps.query, query_head, batch);
        const int64_t at = int64_t{batch * heads + query_head} * statistics.padded + steps.query;
        load_bytes(shared.lse[stage], statistics.lse + at, step * 4, full);
        load_bytes(shared.delta[stage], statistics.delta + at, step * 4, full);
        steps.next();
    };
    shared.own_full.arrive_expecting(shared.k.bytes + shared.v.bytes);
    load_rows(shared.k, k, shared.own_full, block * rows, head, batch);
    load(0);
    load_rows(shared.v, v, shared.own_full, block * rows, head, batch);
    for (int n = 1; n < steps.count; n++) {
        // An owner that has made ds of step n - 2 has done with the queries of step n - 3.
        if (n >= 2) {
            const Stage<shared.ds_stages> earlier(n - 2);
            shared.ds_full[earlier.index].wait(earlier.phase);
        }
        load(n % shared.stages);
    }
}

// turns: of each head and step, how many blocks have added. Two threads: one lets the adder begin, the other announces
// its sums once they are in memory, for which the adder cannot wait.
template <SeenBy seen_by, class E, int HD>
__device__ void follow_turns(Shared<E, HD>& shared, int* turns, int queries, int before, int group, int heads,
                             int padded, bool gives) {
    const int block = shared.block, head = shared.batch * heads + shared.head * group;
    Steps<seen_by> steps(queries, before, block, group);
    for (int n = 0; n < steps.count; n++, steps.next()) {
        const Stage<shared.ds_stages> at(n);
        int* const turn = turns + ((head + steps.head) * padded + steps.query) / step;
        if (gives) {
            shared.added[at.index].wait(at.phase);
            shared.turn_over[at.index].arrive();
            store_release(turn, block + 1);
        } else {
            shared.turn_over[at.index].wait(at.phase ^ 1);
            while (load_acquire(turn) != block) {
            }
            shared.turn_come[at.index].arrive();
        }
    }
}

template <SeenBy seen_by, class E, int HD>
__device__ void compute_keys(Shared<E, HD>& shared, View<E, 4>& dk, View<E, 4>& dv, int queries, int before,
                             int group, float scale) {
    constexpr bool roomy = HD == 64;
    const Consumer consumer;
    const int own = consumer.index * 64, matrix = lane_index() / 8, matrix_row = lane_index() % 8;
    float sum_k[HD / 2] = {}, sum_v[HD / 2] = {}, s[step / 2], dp[step / 2];
    uint32_t p[step / 16][4], ds[step / 16][4];
    operand_fence(sum_k);
    operand_fence(sum_v);
    // Where a lane's row of the first four 8x8 matrices of ds goes; the others differ in these bits.
    const uint32_t ds_at = shared_address(
        shared.ds[0].at(own + consumer.thread / warp_size * 16 + matrix % 2 * 8 + matrix_row, matrix / 2));
    const int block = __shfl(shared.block, 0), count = Steps<seen_by>(queries, before, block, group).count,
              // Steps on the diagonal.
        last = seen_by == SeenBy::later_of_piece && block * rows < before ? 0 : rows / step * group;
    shared.own_full.wait(0);
    for (int n = 0; n < count; n++) {
        const Stage<shared.stages> stage(n);
        const Stage<shared.ds_stages> ds_stage(n);
        shared.full[stage.index].wait(stage.phase);
        warpgroup_arrive();
        begin_rows_product(s, shared.k, own, shared.q[stage.index]);
        warpgroup_wait<roomy ? 1 : 0>();  // for the products of the step before; not roomy: for s too
        operand_fence(sum_k);
        operand_fence(sum_v);
        if constexpr (roomy) {
            warpgroup_arrive();
            begin_rows_product(dp, shared.v, own, shared.dout[stage.index]);
            warpgroup_wait<1>();
        }
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
        if (const int left = count - 1 - n; seen_by != SeenBy::all && left < last) {
            const int query = left < last / 2 ? 0 : step;  // from the block's first key on
#pragma unroll
            for (int i = 0; i < step / 2; i++)
                if (query + i / 4 * 8 + consumer.column + i % 2 < own + consumer.row + i / 2 % 2 * 8)
                    s[i] = 0;
        }
        pack<E>(p, s);
        warpgroup_arrive();
        if constexpr (!roomy) begin_rows_product(dp, shared.v, own, shared.dout[stage.index]);
        begin_columns_product(sum_v, p, shared.dout[stage.index]);
        shared.ds_free[ds_stage.index].wait(ds_stage.phase ^ 1);
        warpgroup_wait<1>();
        operand_fence(dp);
#pragma unroll
        for (int i = 0; i < step / 2; i += 2) {
            const int column = i / 4 * 8 + consumer.column;
            const float2 d = *reinterpret_cast<const float2*>(shared.delta[stage.index] + column);
            float2 x = {s[i], s[i + 1]};
            if constexpr (!roomy) pair_values<E>(p[i / 8][i / 2 % 4], x.x, x.y);
            dp[i] = x.x * (dp[i] - d.x);
            dp[i + 1] = x.y * (dp[i + 1] - d.y);
        }
        pack<E>(ds, dp);
#pragma unroll
        for (int i = 0; i < step / 16; i++)
            store_matrices((ds_at + ds_stage.index * shared.ds[0].bytes) ^ i * 32, ds[i]);
        fence_shared();
        shared.ds_full[ds_stage.index].arrive();  // each thread: it has read lse and delta too
        if constexpr (roomy) {
            warpgroup_arrive();
            begin_columns_product(sum_k, ds, shared.q[stage.index]);
        } else {
            named_barrier_wait(1 + consumer.index, warpgroup_size);
            warpgroup_arrive();
            begin_columns_product(sum_k, shared.ds[ds_stage.index], own, shared.q[stage.index]);
        }
    }
    warpgroup_wait<0>();
    operand_fence(sum_k);
    operand_fence(sum_v);
    const int first = shared.block * rows + own, valid = static_cast<int>(dk.shape[1]) - first;
    store_product(row_of(dv, shared.batch, first, shared.head), dv.stride[1], sum_v, {1, 1}, shared.v,
                  consumer, valid, HD);
    const Stage<shared.ds_stages> end(count - 1);
    shared.ds_free[end.index].wait(end.phase);  // the adder has read k
    store_product(row_of(dk, shared.batch, first, shared.head), dk.stride[1], sum_k, {scale, scale}, shared.k,
                  consumer, valid, HD);
}

// sums, f32[B,NH,padded,HD], lie as threads hold them: of 64 rows and 8 columns, four sums of each thread after another.
template <SeenBy seen_by, class E, int HD>
__device__ void add_queries(Shared<E, HD>& shared, float* sums, int queries, int before, int group, int heads,
                            int padded) {
    const int thread = static_cast<int>(threadIdx.x) % warpgroup_size, block = __shfl(shared.block, 0),
              head = __shfl(shared.batch, 0) * heads + __shfl(shared.head, 0) * group;
    Steps<seen_by> steps(queries, before, block, group);
    float sum[32];
    shared.own_full.wait(0);
    for (int n = 0; n < steps.count; n++, steps.next()) {
        const Stage<shared.ds_stages> stage(n);
        float* to = sums + int64_t{(head + steps.head) * padded + steps.query} * HD + thread * 4;
        shared.ds_full[stage.index].wait(stage.phase);
        const uint64_t left = shared_operand(shared.ds[stage.index].data);
// One panel after another: the sums of both would not fit the registers.
#pragma unroll 1
        for (int panel = 0; panel < HD / 64; panel++, to += 64 * step) {
            const uint64_t right = shared_operand(shared.k.data + panel * shared.k.panel);
            warpgroup_arrive();
#pragma unroll
            for (int d = 0; d < rows / 16; d++) {
                if (d == 0)
                    warpgroup_multiply<E, true, true, true>(sum, left, right);
                else
                    warpgroup_multiply<E, false, true, true>(sum, advance(left, d * 16 * 128),
                                                             advance(right, d * 16 * 128));
            }
            warpgroup_commit();
            warpgroup_wait<0>();
            operand_fence(sum);
            if (panel == HD / 64 - 1) shared.ds_free[stage.index].arrive_as_warp();
            if (panel == 0) shared.turn_come[stage.index].wait(stage.phase);
            if (block == 0) {
#pragma unroll
                for (int i = 0; i < 32; i += 4)
                    *reinterpret_cast<float4*>(to + i * warpgroup_size) =
                        make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
            } else {
#pragma unroll
                for (int i = 0; i < 32; i += 4) add_to_memory(to + i * warpgroup_size, sum + i);
            }
        }
        shared.added[stage.index].arrive_as_warp();
    }
}
#endif

template <class E, int HD, SeenBy seen_by>
__global__ void __launch_bounds__(warpgroups* warpgroup_size, 1)
    attention_backward_wgmma_turns_kernel(View<E, 4> dk, View<E, 4> dv,
                                          LLAMAC_KERNEL_CONSTANT const TensorMap dout,
                                          LLAMAC_KERNEL_CONSTANT const TensorMap q,
                                          LLAMAC_KERNEL_CONSTANT const TensorMap k,
                                          LLAMAC_KERNEL_CONSTANT const TensorMap v, Statistics statistics,
                                          float* sums, int* turns, int* begun, int queries_, int group,
                                          float scale) {
#if defined(LLAMAC_WARPGROUP_CODE)
    Shared<E, HD>& shared = aligned_shared_memory<Shared<E, HD>>();
    if (threadIdx.x == 0) {
        shared.own_full.init(1);
        for (SharedBarrier& full : shared.full) full.init(1);
        for (int i = 0; i < shared.ds_stages; i++) {
            shared.ds_full[i].init(owners * warpgroup_size);
            shared.ds_free[i].init(warpgroup_size / warp_size);
            shared.turn_come[i].init(1);
            shared.added[i].init(warpgroup_size / warp_size);
            shared.turn_over[i].init(1);
        }
        const BlockTile tile = block_tile_of<int64_t>((dk.shape[1] + rows - 1) / rows, dk.shape[2],
                                                      atomicAdd(begun, 1), gridDim.x);
        shared.block = static_cast<int>(tile.block);
        shared.head = static_cast<int>(tile.head);
        shared.batch = static_cast<int>(tile.batch);
        fence_barrier_init();
    }
    __syncthreads();
    const int keys = static_cast<int>(dk.shape[1]),
              queries = seen_by == SeenBy::later_of_piece ? queries_ : keys, before = keys - queries,
              heads = static_cast<int>(dk.shape[2]) * group, padded = static_cast<int>(statistics.padded),
              thread = static_cast<int>(threadIdx.x);
    if (thread / warpgroup_size == helpers) {
        warpgroup_release_registers<helper_registers>();
        if (thread == 0) copy<seen_by>(shared, q, dout, k, v, statistics, queries, before, group, heads);
        if (thread == warp_size || thread == 2 * warp_size)
            follow_turns<seen_by>(shared, turns, queries, before, group, heads, padded, thread == warp_size);
    } else if (thread / warpgroup_size < adder) {
        warpgroup_acquire_registers<owner_registers>();
        compute_keys<seen_by>(shared, dk, dv, queries, before, group, scale);
    } else {
        warpgroup_release_registers<adder_registers>();
        add_queries<seen_by>(shared, sums, queries, before, group, heads, padded);
    }
#endif
}

// dq from the sums as add_queries leaves them, scaled and rounded. A block, 128 threads, 64 rows.
template <class E, int HD>
__global__ void __launch_bounds__(warpgroup_size)
    attention_backward_wgmma_turns_kernel_round(View<E, 4> dq, const float* sums, int64_t padded,
                                                float scale) {
    const int64_t blocks = padded / step, i = blockIdx.x;  // of [B,NH,blocks]
    const int64_t head = i / blocks % dq.shape[2], batch = i / blocks / dq.shape[2];
    const int thread = static_cast<int>(threadIdx.x), row = thread / warp_size * 16 + lane_index() / 4;
    for (int part = 0; part < HD / 8; part++) {
        const float4 sum =
            *reinterpret_cast<const float4*>(sums + i * step * HD + (part * warpgroup_size + thread) * 4);
        const int column = part * 8 + lane_index() % 4 * 2;
        for (int slot = 0; slot < 2; slot++) {
            const int64_t t = i % blocks * step + row + 8 * slot;
            const uint32_t pair = slot ? pair_bits<E>(sum.z * scale, sum.w * scale)
                                       : pair_bits<E>(sum.x * scale, sum.y * scale);
            if (t < dq.shape[1]) *reinterpret_cast<uint32_t*>(row_of(dq, batch, t, head) + column) = pair;
        }
    }
}

template <class E, int HD, SeenBy seen_by>
void launch_turns(View<E, 4> dq, View<E, 4> dk, View<E, 4> dv, View<const E, 4> dout, View<const E, 4> q,
                  View<const E, 4> k, View<const E, 4> v, const Statistics& statistics, float scale,
                  void* workspace, hipStream_t stream) {
    const int64_t B = q.shape[0], NH = q.shape[2], NKV = k.shape[2], padded = statistics.padded;
    float* const sums = static_cast<float*>(workspace);
    int* const turns = reinterpret_cast<int*>(sums + B * NH * padded * HD);
    int* const begun = turns + B * NH * padded / step;
    CHECK(hipMemsetAsync(turns, 0, static_cast<size_t>(B * NH * padded / step + 1) * sizeof(int), stream));
    launch(Grid(blocks_for((k.shape[1] + rows - 1) / rows * NKV * B, 1), warpgroups * warpgroup_size, stream,
                aligned_shared_bytes<Shared<E, HD>>),
           attention_backward_wgmma_turns_kernel<E, HD, seen_by>, dk, dv, map_of(dout, step), map_of(q, step),
           map_of(k, rows), map_of(v, rows), statistics, sums, turns, begun, static_cast<int>(q.shape[1]),
           static_cast<int>(NH / NKV), scale);
    launch(Grid(blocks_for(padded / step * NH * B, 1), warpgroup_size, stream),
           attention_backward_wgmma_turns_kernel_round<E, HD>, dq, sums, padded, scale);
}

}  // namespace

template <class E>
void attention_backward_wgmma_turns(View<E, 4> dq, View<E, 4> dk, View<E, 4> dv, View<const E, 4> dout,
                                    View<const E, 4> q, View<const E, 4> k, View<const E, 4> v,
                                    const Statistics& statistics, float scale, bool causal, void* workspace,
                                    hipStream_t stream) {
    const auto run = [&]<int HD>() {
        const auto launch_one = !causal                    ? launch_turns<E, HD, SeenBy::all>
                                : k.shape[1] == q.shape[1] ? launch_turns<E, HD, SeenBy::later>
                                                           : launch_turns<E, HD, SeenBy::later_of_piece>;
        launch_one(dq, dk, dv, dout, q, k, v, statistics, scale, workspace, stream);
    };
    if (q.shape[3] == 64)
        run.template operator()<64>();
    else
        run.template operator()<128>();
}

template decltype(attention_backward_wgmma_turns<bf16>) attention_backward_wgmma_turns<bf16>;
template decltype(attention_backward_wgmma_turns<fp16>) attention_backward_wgmma_turns<fp16>;

int64_t attention_backward_wgmma_turns_bytes(int64_t queries, int64_t HD) {
    return queries * HD * 4 + (queries / step + 1) * 4;
}

}  // namespace llamac
#endif
