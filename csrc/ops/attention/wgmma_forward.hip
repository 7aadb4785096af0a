// Attention forward for Hopper, variant `wgmma` of attention.hip (Shah et al. 2024, FlashAttention-3). mma.sync reaches about
// 60% of the speed of Hopper's tensor cores; wgmma reaches all of it, but takes 128 threads, reads LDS by itself and runs
// asynchronously: another shape of kernel. A block is three warpgroups, four at HD 64, where products are too short to hide the
// exponentials of one other warpgroup and sums leave registers for it:
//
//   one thread of the first   takes tiles of queries from a counter, copies q, then k and v step by step (TMA) into stages
//   the others                own 64 rows of q each. While the tensor cores compute s_n = q k_n' and o += p v_n-1, other
//                             warpgroups compute exponentials: named barriers give them turns; within a warpgroup the
//                             exponentials of s_n run beside p v.
//
// Blocks are persistent: while a warpgroup stores one tile, the next one's q, k and v arrive, and a finished warpgroup begins
// with it. Exception: with HD 64 and without masks, a block has one tile where heads are long, because operands' addresses that
// change from tile to tile make a step 5% slower.
//
// Cycles of a multiprocessor per step of 64 rows and 128 keys, HD 128 (HD 64): products 1024 (512), exponentials 512,
// 290 (260) other instructions of each warp. Experiments: docs/log/attention.md.
//
// Keys are walked from the last to the first. A warpgroup's rows lie within one step's keys: only the first step that it takes
// part in has a diagonal. With three of them the tile's first step is not the first of all.
//
// With masks (documents, windows, other keys than queries) a tile's steps go from the last key that one of its queries sees to
// the first; every warpgroup takes part in all steps, and hides scores in the steps that its queries do not see as a whole. A
// kernel of its own does this, also for heads that are narrower than its tiles, which TMA fills with zeros.
#include "ops/attention/attention.h"
#include "ops/attention/wgmma.h"

#if defined(LLAMAC_WARPGROUPS)
namespace llamac {
namespace {

constexpr int step = 128;  // keys
template <int HD>
constexpr int consumers = HD == 64 ? 3 : 2;
template <int HD>
constexpr int stages = HD == 64 ? 3 : 2;
template <int HD>
constexpr int rows = 64 * consumers<HD>;  // of q, of a tile
constexpr int64_t long_head = 4096;       // queries

// stays: a block takes tile after tile.
template <class E, int HD, bool stays>
struct Shared {
    using StepPipeline = Pipeline<stages<HD>, consumers<HD>>;
    static constexpr int tile_stages = stays ? 2 : 1;
    Panels<E, HD, rows<HD>> q[tile_stages];
    Panels<E, HD, step> k[stages<HD>], v[stages<HD>];
    int tile[tile_stages];  // of Tiles; `count` where there are no more
    SharedBarrier q_full[tile_stages], q_free[tile_stages];
    StepPipeline of_k, of_v;
};

#if defined(LLAMAC_WARPGROUP_CODE)
// For all keys before `row`.
__device__ int steps_until(int row) {
    return (row + step - 1) / step;
}
// A block's steps: of the keys, from step `first` on, last step first.
struct Steps {
    int first = 0, count;

    __device__ Steps(bool masked, const auto& sight, int row, int rows) : count(steps_until(row + rows)) {
        if (!masked) return;
        first = sight.begin(row) / step;
        count = steps_until(sight.end(row + rows - 1)) - first;
    }
    __device__ int key(int n) const { return (first + count - 1 - n) * step; }
};

// All tiles of a call, in the order of block_tile_of; those with more keys come first. Without masks, the last tile of a head ends
// with its last row: a warpgroup without rows is one of the first tile, which has few steps. With masks, tiles begin with
// the first row.
template <int HD>
struct Tiles {
    // Tiles are moved by multiples of it. A tile of 192 rows has one step without its first warpgroup wherever it begins (compute:
    // `begun`), a tile of 128 rows has none only where it begins with a step.
    static constexpr int unit = rows<HD> % step ? 64 : step;
    int per_head, heads, count, before;  // before: rows of the first tile that are none

    template <class E>
    __device__ Tiles(bool masked, const View<E, 4>& out)
        : per_head(static_cast<int>((out.shape[1] + rows<HD> - 1) / rows<HD>)),
          heads(static_cast<int>(out.shape[2])),
          count(per_head * heads * static_cast<int>(out.shape[0])),
          before(masked ? 0 : (per_head * rows<HD> - static_cast<int>(out.shape[1])) / unit * unit) {}
    // Rows of a tile, counted from the head's first row.
    __device__ int row(const BlockTile& tile) const {
        return static_cast<int>(tile.block) * rows<HD> - before;
    }
    __device__ BlockTile operator[](int i) const {
        BlockTile tile = block_tile_of(per_head, heads, i, count);
        tile.block = per_head - 1 - tile.block;
        return tile;
    }
};

template <Masks kind, class E, int HD, bool stays>
__device__ void copy_all(Shared<E, HD, stays>& shared, const TensorMap& q, const TensorMap& k,
                         const TensorMap& v, const AttentionMask& visible, const Tiles<HD>& tiles, int* taken,
                         int group) {
    int n = 0;  // step of the pipelines
    for (int i = 0;; i++) {
        const Stage<shared.tile_stages> at(i);
        const int next =
            i == 0 ? static_cast<int>(blockIdx.x) : static_cast<int>(gridDim.x) + atomicAdd(taken, 1);
        shared.q_free[at.index].wait(at.phase ^ 1);
        shared.tile[at.index] = next;
        if (next >= tiles.count) {
            shared.q_full[at.index].arrive();
            return;
        }
        const BlockTile tile = tiles[next];
        const int first = tiles.row(tile), head = static_cast<int>(tile.head),
                  batch = static_cast<int>(tile.batch), key_head = head / group;
        shared.q_full[at.index].arrive_expecting(shared.q[0].bytes);
        load_rows(shared.q[at.index], q, shared.q_full[at.index], first, head, batch);
        const Steps steps(kind != no_masks, SequenceMask<kind>(visible, batch), first, rows<HD>);
        const auto load = [&](Panels<E, HD, step>(&to)[stages<HD>], const TensorMap& map,
                              typename Shared<E, HD, stays>::StepPipeline& pipeline, int key) {
            const Stage<stages<HD>> stage(n);
            pipeline.free[stage.index].wait(stage.phase ^ 1);
            pipeline.full[stage.index].arrive_expecting(to[stage.index].bytes);
            load_rows(to[stage.index], map, pipeline.full[stage.index], key, key_head, batch);
        };
#pragma unroll 1  // for few registers
        for (int m = 0; m < steps.count; m++, n++) {
            load(shared.k, k, shared.of_k, steps.key(m));
            load(shared.v, v, shared.of_v, steps.key(m));
        }
        if (!stays) return;
    }
}

// A warpgroup's rows of the running softmax: two a thread.
struct Rows {
    float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};

    // Scores become probabilities relative to the largest so far; shrink: the factor of older
    // ones. hides: a row's scores may all be hidden so far.
    template <bool hides, int n>
    __device__ void softmax(float (&s)[n], float scale, float (&shrink)[2]) {
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            float top = largest[slot];
#pragma unroll
            for (int i = 2 * slot; i < n; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
            top = fmaxf(top, __shfl_xor(top, 1));
            top = fmaxf(top, __shfl_xor(top, 2));
            const float shift = hides && top == -INFINITY ? 0 : top * scale;
            shrink[slot] = fast_exp2(largest[slot] * scale - shift);
            largest[slot] = top;
            float total = 0;
#pragma unroll
            for (int i = 2 * slot; i < n; i += 4) {
                s[i] = fast_exp2(fmaf(s[i], scale, -shift));
                s[i + 1] = fast_exp2(fmaf(s[i + 1], scale, -shift));
                total += s[i] + s[i + 1];
            }
            sum[slot] = sum[slot] * shrink[slot] + total;
        }
    }
};

// The consumers take turns from their first tile to their last.
template <int HD>
struct Turns {
    static constexpr int barriers = 6;  // from here on, one per consumer
    int own, next;

    __device__ explicit Turns(const Consumer& consumer)
        : own(consumer.index), next(own == consumers<HD> - 1 ? 0 : own + 1) {
        if (next == 0) give();
    }
    __device__ void wait() const { named_barrier_wait(barriers + own, 2 * warpgroup_size); }
    __device__ void give() const { named_barrier_arrive(barriers + next, 2 * warpgroup_size); }
};

// The number of the tile in stage `at`.
template <class E, int HD, bool stays>
__device__ int tile_number(const Shared<E, HD, stays>& shared, int at) {
    return stays ? __shfl(shared.tile[at], 0) : static_cast<int>(blockIdx.x);
}
// The tile in stage `at`; its first step is step `base` of the pipelines.
template <Masks kind, class E, int HD, bool stays>
__device__ void compute(Shared<E, HD, stays>& shared, int at, View<E, 4>& out, View<float, 3>& lse,
                        const AttentionMask& visible, const Tiles<HD>& tiles, int& base,
                        const Consumer& consumer, const Turns<HD>& turns, float scale) {
    constexpr bool masked = kind != no_masks;
    Panels<E, HD, rows<HD>>& q = shared.q[at];
    const BlockTile begins = tiles[tile_number(shared, at)];
    const int block = tiles.row(begins), first = block + consumer.index * 64;
    const SequenceMask<kind> sight(visible, begins.batch);
    const Steps steps(masked, sight, block, rows<HD>);
    const int begin = masked ? 0 : steps.count - steps_until(max(first + 64, 1));
    // Turns begin when all have begun.
    constexpr int begun = masked || rows<HD> % step == 0 ? 0 : 1;
    SeenColumns own;
    if constexpr (masked) own.of_queries(sight, first, consumer);
    Rows state;
    float s[step / 2], o[HD / 2] = {}, shrink[2];
    uint32_t p[step / 16][4];
    operand_fence(o);
    if (begin > 0) {
        const Stage<stages<HD>> skipped(base);
        shared.of_k.free[skipped.index].arrive_as_warp();
        shared.of_v.free[skipped.index].arrive_as_warp();
    }
    const Stage<stages<HD>> one(base + begin);
    shared.of_k.full[one.index].wait(one.phase);
    warpgroup_arrive();
    begin_rows_product(s, q, consumer.index * 64, shared.k[one.index]);
    warpgroup_wait<0>();
    operand_fence(s);
    shared.of_k.free[one.index].arrive_as_warp();
    if constexpr (masked) {
        own.hide(s, steps.key(0), -INFINITY);
    } else {
#pragma unroll
        for (int i = 0; i < step / 2; i++)
            if (i / 4 * 8 + consumer.column + i % 2 > first % step + consumer.row + i / 2 % 2 * 8)
                s[i] = -INFINITY;
    }
    state.template softmax<masked>(s, scale * log2_e, shrink);
    pack<E>(p, s);
    for (int n = begin + 1; n < steps.count; n++) {
        const Stage<stages<HD>> keys(base + n), values(base + n - 1);
        shared.of_k.full[keys.index].wait(keys.phase);
        if (n > begun) turns.wait();
        warpgroup_arrive();
        begin_rows_product(s, q, consumer.index * 64, shared.k[keys.index]);
        shared.of_v.full[values.index].wait(values.phase);
        warpgroup_arrive();
        begin_columns_product(o, p, shared.v[values.index]);
        if (n > begun) turns.give();
        warpgroup_wait<1>();
        operand_fence(s);
        shared.of_k.free[keys.index].arrive_as_warp();
        if constexpr (masked) own.hide(s, steps.key(n), -INFINITY);
        state.template softmax<masked>(s, scale * log2_e, shrink);
        compute_before(state.sum[0] + state.sum[1]);
        warpgroup_wait<0>();
        operand_fence(o);
        shared.of_v.free[values.index].arrive_as_warp();
#pragma unroll
        for (int i = 0; i < HD / 2; i++) o[i] *= shrink[i / 2 % 2];
        pack<E>(p, s);
    }
    const Stage<stages<HD>> last(base + steps.count - 1);
    shared.of_v.full[last.index].wait(last.phase);
    warpgroup_arrive();
    begin_columns_product(o, p, shared.v[last.index]);
    warpgroup_wait<0>();
    operand_fence(o);
    shared.of_v.free[last.index].arrive_as_warp();
    base += steps.count;

    const BlockTile tile = tiles[tile_number(shared, at)];  // made again, not kept in registers
    const int valid = first < 0 ? 0 : static_cast<int>(out.shape[1]) - first;
    float inverse[2];
#pragma unroll
    for (int slot = 0; slot < 2; slot++) {
        float sum = state.sum[slot];
        sum += __shfl_xor(sum, 1);
        sum += __shfl_xor(sum, 2);
        inverse[slot] = 1 / sum;
        const int row = consumer.row + 8 * slot;
        if (consumer.column == 0 && row < valid)
            lse(tile.batch, tile.head, first + row) = state.largest[slot] * scale + logf(sum);
    }
    store_product(row_of(out, tile.batch, first, tile.head), out.stride[1], o, inverse, q, consumer, valid,
                  masked ? static_cast<int>(out.shape[3]) : HD);
}

template <Masks kind, class E, int HD, bool stays>
__device__ void compute_all(Shared<E, HD, stays>& shared, View<E, 4>& out, View<float, 3>& lse,
                            const AttentionMask& visible, const Tiles<HD>& tiles, float scale) {
    const Consumer consumer;
    const Turns<HD> turns(consumer);
    int base = 0;
    if constexpr (!stays) {
        shared.q_full[0].wait(0);
        compute<kind>(shared, 0, out, lse, visible, tiles, base, consumer, turns, scale);
    } else {
        for (int i = 0;; i++) {
            const Stage<shared.tile_stages> at(i);
            shared.q_full[at.index].wait(at.phase);
            if (tile_number(shared, at.index) >= tiles.count) return;
            compute<kind>(shared, at.index, out, lse, visible, tiles, base, consumer, turns, scale);
            fence_shared();  // the results that went through q
            shared.q_free[at.index].arrive();
        }
    }
}
#endif

template <class E, int HD, Masks kind, bool stays>
__global__ void __launch_bounds__(Warpgroups<consumers<HD>>::threads, 1)
    attention_forward_wgmma_kernel(View<E, 4> out, View<float, 3> lse, AttentionMask visible,
                                   LLAMAC_KERNEL_CONSTANT const TensorMap q,
                                   LLAMAC_KERNEL_CONSTANT const TensorMap k,
                                   LLAMAC_KERNEL_CONSTANT const TensorMap v, int* taken, int group,
                                   float scale) {
#if defined(LLAMAC_WARPGROUP_CODE)
    Shared<E, HD, stays>& shared = aligned_shared_memory<Shared<E, HD, stays>>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < shared.tile_stages; i++) {
            shared.q_full[i].init(1);
            shared.q_free[i].init(shared.of_k.threads);
        }
        shared.of_k.init(shared.of_k.warps);
        shared.of_v.init(shared.of_v.warps);
        fence_barrier_init();
    }
    __syncthreads();
    const Tiles<HD> tiles(kind != no_masks, out);
    if (threadIdx.x < warpgroup_size) {
        warpgroup_release_registers<Warpgroups<consumers<HD>>::producer_registers>();
        if (threadIdx.x == 0) copy_all<kind>(shared, q, k, v, visible, tiles, taken, group);
    } else {
        warpgroup_acquire_registers<Warpgroups<consumers<HD>>::consumer_registers>();
        compute_all<kind>(shared, out, lse, visible, tiles, scale);
    }
#endif
}

template <class E>
void attention_forward_wgmma(View<E, 4> out, View<float, 3> lse, View<const E, 4> q, View<const E, 4> k,
                             View<const E, 4> v, View<const int32_t, 2> first, View<const int32_t, 2> ends,
                             double scale, bool causal, int64_t window, LaunchContext context) {
    const AttentionMask visible(q, k, first, ends, causal, window);
    int* const taken = static_cast<int*>(context.workspace);
    on_heads(visible, q, [&](auto head, auto masks) {
        constexpr int HD = decltype(head)::value;
        const int64_t tiles = (q.shape[1] + rows<HD> - 1) / rows<HD> * q.shape[2] * q.shape[0];
        const auto launch_blocks = [&](auto stays, int64_t blocks) {
            launch(Grid(blocks_for(blocks, 1), Warpgroups<consumers<HD>>::threads, context.stream,
                        aligned_shared_bytes<Shared<E, HD, decltype(stays)::value>>),
                   attention_forward_wgmma_kernel<E, HD, decltype(masks)::value, decltype(stays)::value>, out,
                   lse, visible, map_of(q, rows<HD>), map_of(k, step), map_of(v, step), taken,
                   static_cast<int>(q.shape[2] / k.shape[2]), static_cast<float>(scale));
        };
        if constexpr (HD == 64 && decltype(masks)::value == no_masks)
            if (q.shape[1] >= long_head) return launch_blocks(std::false_type(), tiles);
        CHECK(hipMemsetAsync(taken, 0, sizeof(int), context.stream));
        launch_blocks(std::true_type(), std::min(tiles, int64_t{device_properties().multiprocessors}));
    });
}

}  // namespace

bool wgmma_supports(const Call& call) {
    return device_properties().warpgroups && call["HD"] >= 64 && flash_supports(call);
}

Variant wgmma_attention_forward() {
    return {.name = "wgmma",
            .idea = "as flash, with wgmma, TMA, warps that copy and warps that compute",
            .instantiations = instantiations<attention_forward_wgmma<bf16>, attention_forward_wgmma<fp16>>(),
            .supports = wgmma_constraints,
            .workspace = [](const Call&) { return int64_t{sizeof(int)}; },
            .chip = wgmma_chip};
}

}  // namespace llamac
#endif
