// Attention forward for Hopper, variant `wgmma` of attention.hip (Shah et al. 2024, FlashAttention-3). mma.sync cannot
// reach more than about 60% of what Hopper's tensor cores do; wgmma can, but takes 128 threads, reads LDS by
// itself and runs asynchronously: another shape of kernel. A block is three warpgroups, four at HD 64, where
// products are too short to hide the exponentials of one other warpgroup and sums leave registers for it:
//
//   one thread of the first   copies q, then k and v step by step (TMA) into stages
//   the others                own 64 rows of q each. While the tensor cores work on s_n = q k_n' and o += p v_n-1,
//                             the exponentials of the other warpgroups are computed: named barriers let them
//                             take turns; within a warpgroup the exponentials of s_n run beside p v.
//
// Cycles of a multiprocessor per step of 64 rows and 128 keys, HD 128 (HD 64): products 1024 (512), exponentials 512,
// 290 (260) other instructions of each warp. What was tried: docs/log/attention.md.
//
// Keys are walked from the last to the first. A warpgroup's rows lie within one step's keys: only the first step
// that it takes part in has a diagonal. With three of them the block's first step is not the first of all.
//
// With masks (documents, windows, other keys than queries) a block walks from the last key that one of its queries sees to
// the first; every warpgroup takes part in all steps, and hides scores in those of which its queries do not see all: a
// kernel of its own, for heads that are narrower than its tiles too, which TMA fills with zeros.
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
constexpr int rows = 64 * consumers<HD>;  // of q, of a block

template <int HD>
struct Shared {
    using StepPipeline = Pipeline<stages<HD>, consumers<HD>>;
    Panels<HD, rows<HD>> q;
    Panels<HD, step> k[stages<HD>], v[stages<HD>];
    SharedBarrier q_full;
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

    __device__ Steps(bool masked, const Sight& sight, int row, int rows) : count(steps_until(row + rows)) {
        if (!masked) return;
        first = sight.begin(row) / step;
        count = steps_until(sight.end(row + rows - 1)) - first;
    }
    __device__ int key(int n) const { return (first + count - 1 - n) * step; }
};

template <bool masked, int HD>
__device__ void copy_all(Shared<HD>& shared, const TensorMap& q, const TensorMap& k, const TensorMap& v,
                         const Sight& sight, int block, const BlockTile& tile, int64_t key_head) {
    shared.q_full.arrive_expecting(shared.q.bytes);
    load_rows(shared.q, q, shared.q_full, block * rows<HD>, tile.head, tile.batch);
    const Steps steps(masked, sight, block * rows<HD>, rows<HD>);
    const auto load = [&](Panels<HD, step>(&to)[stages<HD>], const TensorMap& map,
                          typename Shared<HD>::StepPipeline& pipeline, int n) {
        const Stage<stages<HD>> stage(n);
        pipeline.free[stage.index].wait(stage.phase ^ 1);
        pipeline.full[stage.index].arrive_expecting(to[stage.index].bytes);
        load_rows(to[stage.index], map, pipeline.full[stage.index], steps.key(n), key_head, tile.batch);
    };
    for (int n = 0; n < steps.count; n++) {
        load(shared.k, k, shared.of_k, n);
        load(shared.v, v, shared.of_v, n);
    }
}

// A warpgroup's rows of the running softmax: two a thread.
struct Rows {
    float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};

    // Scores become probabilities relative to the largest so far; shrink: what the older ones are to be
    // multiplied by. hides: a row's scores may all be hidden so far.
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

template <bool masked, int HD>
__device__ void compute(Shared<HD>& shared, View<bf16, 4>& out, View<float, 3>& lse, const Sight& sight,
                        int block, const BlockTile& tile, float scale) {
    constexpr int turns = 6;  // barriers from here on, one per consumer
    const Consumer consumer;
    const int next = consumer.index == consumers<HD> - 1 ? 0 : consumer.index + 1;
    const auto wait_turn = [&] { named_barrier_wait(turns + consumer.index, 2 * warpgroup_size); };
    const auto give_turn = [&] { named_barrier_arrive(turns + next, 2 * warpgroup_size); };

    const int first = block * rows<HD> + consumer.index * 64;
    const Steps steps(masked, sight, block * rows<HD>, rows<HD>);
    const int begin = masked ? 0 : steps.count - steps_until(first + 64);
    // Turns begin when all have begun.
    constexpr int begun = masked || rows<HD> % step == 0 ? 0 : 1;
    SeenColumns own;
    if constexpr (masked) own.of_queries(sight, first, consumer);
    Rows state;
    float s[step / 2], o[HD / 2] = {}, shrink[2];
    uint32_t p[step / 16][4];
    operand_fence(o);
    if (next == 0) give_turn();
    shared.q_full.wait(0);
    if (begin > 0) {
        shared.of_k.free[0].arrive_as_warp();
        shared.of_v.free[0].arrive_as_warp();
    }
    shared.of_k.full[begin].wait(0);
    warpgroup_arrive();
    begin_rows_product(s, shared.q, consumer.index * 64, shared.k[begin]);
    warpgroup_wait<0>();
    operand_fence(s);
    shared.of_k.free[begin].arrive_as_warp();
    if constexpr (masked) {
        own.hide(s, steps.key(0), -INFINITY);
    } else {
#pragma unroll
        for (int i = 0; i < step / 2; i++)
            if (i / 4 * 8 + consumer.column + i % 2 > first % step + consumer.row + i / 2 % 2 * 8)
                s[i] = -INFINITY;
    }
    state.template softmax<masked>(s, scale * log2_e, shrink);
    pack(p, s);
    for (int n = begin + 1; n < steps.count; n++) {
        const Stage<stages<HD>> keys(n), values(n - 1);
        shared.of_k.full[keys.index].wait(keys.phase);
        if (n > begun) wait_turn();
        warpgroup_arrive();
        begin_rows_product(s, shared.q, consumer.index * 64, shared.k[keys.index]);
        shared.of_v.full[values.index].wait(values.phase);
        warpgroup_arrive();
        begin_columns_product(o, p, shared.v[values.index]);
        if (n > begun) give_turn();
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
        pack(p, s);
    }
    const Stage<stages<HD>> last(steps.count - 1);
    shared.of_v.full[last.index].wait(last.phase);
    warpgroup_arrive();
    begin_columns_product(o, p, shared.v[last.index]);
    warpgroup_wait<0>();
    operand_fence(o);

    const int time = static_cast<int>(out.shape[1]);
    float inverse[2];
#pragma unroll
    for (int slot = 0; slot < 2; slot++) {
        float sum = state.sum[slot];
        sum += __shfl_xor(sum, 1);
        sum += __shfl_xor(sum, 2);
        inverse[slot] = 1 / sum;
        const int t = first + consumer.row + 8 * slot;
        if (consumer.column == 0 && t < time)
            lse(tile.batch, tile.head, t) = state.largest[slot] * scale + logf(sum);
    }
    store_product(row_of(out, tile.batch, first, tile.head), out.stride[1], o, inverse, shared.q, consumer,
                  time - first, masked ? static_cast<int>(out.shape[3]) : HD);
}
#endif

template <int HD, bool masked>
__global__ void __launch_bounds__(Warpgroups<consumers<HD>>::threads, 1)
    attention_forward_wgmma_kernel(View<bf16, 4> out, View<float, 3> lse, Visible visible,
                                   LLAMAC_KERNEL_CONSTANT const TensorMap q,
                                   LLAMAC_KERNEL_CONSTANT const TensorMap k,
                                   LLAMAC_KERNEL_CONSTANT const TensorMap v, int group, float scale) {
#if defined(LLAMAC_WARPGROUP_CODE)
    Shared<HD>& shared = aligned_shared_memory<Shared<HD>>();
    if (threadIdx.x == 0) {
        shared.q_full.init(1);
        shared.of_k.init(shared.of_k.warps);
        shared.of_v.init(shared.of_v.warps);
        fence_barrier_init();
    }
    __syncthreads();
    const int blocks = static_cast<int>((out.shape[1] + rows<HD> - 1) / rows<HD>);
    const BlockTile tile = block_tile_of(blocks, out.shape[2]);
    const int block = blocks - 1 - static_cast<int>(tile.block);  // more keys come first
    const Sight sight(visible, tile.batch);
    if (threadIdx.x < warpgroup_size) {
        warpgroup_release_registers<Warpgroups<consumers<HD>>::producer_registers>();
        if (threadIdx.x == 0) copy_all<masked>(shared, q, k, v, sight, block, tile, tile.head / group);
    } else {
        warpgroup_acquire_registers<Warpgroups<consumers<HD>>::consumer_registers>();
        compute<masked>(shared, out, lse, sight, block, tile, scale);
    }
#endif
}

}  // namespace

void attention_forward_wgmma(View<bf16, 4> out, View<float, 3> lse, View<const bf16, 4> q,
                             View<const bf16, 4> k, View<const bf16, 4> v, View<const int32_t, 2> first,
                             double scale, bool causal, int64_t window, LaunchContext context) {
    const Visible visible(q, k, first, causal, window);
    on_heads(visible, q, [&](auto head, auto masked) {
        constexpr int HD = decltype(head)::value;
        const int64_t blocks = (q.shape[1] + rows<HD> - 1) / rows<HD>;
        launch(Grid(blocks_for(blocks * q.shape[2] * q.shape[0], 1), Warpgroups<consumers<HD>>::threads,
                    context.stream, aligned_shared_bytes<Shared<HD>>),
               attention_forward_wgmma_kernel<HD, decltype(masked)::value>, out, lse, visible,
               map_of(q, rows<HD>), map_of(k, step), map_of(v, step),
               static_cast<int>(q.shape[2] / k.shape[2]), static_cast<float>(scale));
    });
}

bool wgmma_supports(const Call& call) {
    return device_properties().warpgroups && call["HD"] >= 64 && flash_supports(call);
}

}  // namespace llamac
#endif
