// Attention forward for Hopper, variant 3 of attention.hip (Shah et al. 2024, FlashAttention-3). mma.sync cannot
// reach more than about 60% of what Hopper's tensor cores do; wgmma can, but takes 128 threads, reads LDS by
// itself and runs asynchronously: another shape of kernel. A block is three warpgroups:
//
//   one thread of the first   copies q, then k and v step by step (TMA) into two buffers each
//   the others                own 64 rows of q each. While the tensor cores work on s_n = q k_n' and o += p v_n-1,
//                             the exponentials of the other warpgroup are computed: a pair of named barriers
//                             lets them take turns; within a warpgroup the exponentials of s_n run beside p v.
//
// Keys are walked from the last to the first: a block's rows are as many as a step's keys, so only the first
// step has a diagonal.
#include "ops/attention/attention.h"
#include "ops/attention/flash.h"
#include "platform/warpgroup.h"

#if defined(LLAMAC_WARPGROUPS)
namespace llamac {
namespace {

template <int HD>
struct Sizes {
    static constexpr int workers = 2, rows = 64 * workers, threads = (1 + workers) * warpgroup_size,
                         stages = 2;
    static constexpr int panels = HD / 64, panel = rows * 128,
                         tile = panels * panel;  // bytes of 64 columns, of all
};
template <int HD>
struct Shared {
    using S = Sizes<HD>;
    char q[S::tile], k[S::stages][S::tile], v[S::stages][S::tile];
    SharedBarrier q_full, k_full[S::stages], k_free[S::stages], v_full[S::stages], v_free[S::stages];
};

#if defined(LLAMAC_WARPGROUP_CODE)
// A ring of buffers: which is the n-th, and the parity of its phase.
template <int HD>
struct Turn {
    int buffer, parity;
    __device__ explicit Turn(int n) : buffer(n % Sizes<HD>::stages), parity(n / Sizes<HD>::stages % 2) {}
};

template <int HD>
__device__ void load_rows(char* to, const TensorMap& map, SharedBarrier& full, int row, int head, int batch) {
    full.arrive_expecting(Sizes<HD>::tile);
    for (int p = 0; p < Sizes<HD>::panels; p++)
        load_tile(to + p * Sizes<HD>::panel, map, full, 64 * p, row, head, batch);
}

template <int HD>
__device__ void copy_all(Shared<HD>& shared, const TensorMap& q, const TensorMap& k, const TensorMap& v,
                         int block, int head, int key_head, int batch) {
    constexpr int rows = Sizes<HD>::rows;
    load_rows<HD>(shared.q, q, shared.q_full, block * rows, head, batch);
    for (int n = 0; n <= block; n++) {
        const Turn<HD> turn(n);
        shared.k_free[turn.buffer].wait(turn.parity ^ 1);
        load_rows<HD>(shared.k[turn.buffer], k, shared.k_full[turn.buffer], (block - n) * rows, key_head,
                      batch);
        shared.v_free[turn.buffer].wait(turn.parity ^ 1);
        load_rows<HD>(shared.v[turn.buffer], v, shared.v_full[turn.buffer], (block - n) * rows, key_head,
                      batch);
    }
}

// A warpgroup's rows of the running softmax: two a thread.
struct Rows {
    float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};

    // Scores become probabilities relative to the largest so far; shrink: what the older ones are to be
    // multiplied by.
    template <int n>
    __device__ void softmax(float (&s)[n], float scale, float (&shrink)[2]) {
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            float top = largest[slot];
#pragma unroll
            for (int i = 2 * slot; i < n; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
            top = fmaxf(top, __shfl_xor(top, 1));
            top = fmaxf(top, __shfl_xor(top, 2));
            const float shift = top * scale;
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

// s = q k': a warpgroup's 64 rows with all keys of a step.
template <int HD>
__device__ void begin_scores(float (&s)[Sizes<HD>::rows / 2], const char* q, const char* k) {
    const uint64_t a = shared_operand(q), b = shared_operand(k);
#pragma unroll
    for (int d = 0; d < HD / 16; d++) {
        const int at = d / 4 * Sizes<HD>::panel + d % 4 * 32;
        warpgroup_multiply<false>(s, advance(a, at), advance(b, at), d > 0);
    }
    products_commit();
}
// o += p v.
template <int HD>
__device__ void begin_values(float (&o)[HD / 2], const uint32_t (&p)[Sizes<HD>::rows / 16][4], const char* v,
                             bool add) {
    const uint64_t b = shared_operand(v, Sizes<HD>::panel);
#pragma unroll
    for (int d = 0; d < Sizes<HD>::rows / 16; d++)
        warpgroup_multiply<true>(o, p[d], advance(b, d * 16 * 128), add || d > 0);
    products_commit();
}
template <int n>
__device__ void pack(uint32_t (&p)[n / 8][4], const float (&s)[n]) {
#pragma unroll
    for (int i = 0; i < n; i += 2) p[i / 8][i / 2 % 4] = bf16_pair(s[i], s[i + 1]);
}

template <int HD>
__device__ void compute(Shared<HD>& shared, View<bf16, 4>& out, View<float, 3>& lse, int block, int head,
                        int batch, float scale) {
    constexpr int rows = Sizes<HD>::rows;
    const int worker = static_cast<int>(threadIdx.x) / warpgroup_size - 1;
    const int thread = static_cast<int>(threadIdx.x) % warpgroup_size, lane = lane_index();
    const int row = worker * 64 + thread / warp_size * 16 + lane / 4;  // of slot 0; of slot 1: 8 further
    const char* const q = shared.q + worker * 64 * 128;
    const auto free = [&](SharedBarrier& barrier) {
        if (lane == 0) barrier.arrive();
    };
    const auto wait_turn = [&] { named_barrier_wait(1 + worker, 2 * warpgroup_size); };
    const auto give_turn = [&] { named_barrier_arrive(2 - worker, 2 * warpgroup_size); };

    Rows state;
    float s[rows / 2], o[HD / 2], shrink[2];
    uint32_t p[rows / 16][4];
    if (worker == 1) give_turn();  // the first worker begins
    shared.q_full.wait(0);
    shared.k_full[0].wait(0);
    products_begin();
    begin_scores<HD>(s, q, shared.k[0]);
    products_wait<0>();
    keep_in_place(s);
    free(shared.k_free[0]);
#pragma unroll
    for (int i = 0; i < rows / 2; i++)
        if (i / 4 * 8 + lane % 4 * 2 + i % 2 > row + i / 2 % 2 * 8) s[i] = -INFINITY;
    state.softmax(s, scale * log2_e, shrink);
    pack(p, s);
    for (int n = 1; n <= block; n++) {
        const Turn<HD> keys(n), values(n - 1);
        shared.k_full[keys.buffer].wait(keys.parity);
        wait_turn();
        products_begin();
        begin_scores<HD>(s, q, shared.k[keys.buffer]);
        shared.v_full[values.buffer].wait(values.parity);
        begin_values<HD>(o, p, shared.v[values.buffer], n > 1);
        give_turn();
        products_wait<1>();
        keep_in_place(s);
        free(shared.k_free[keys.buffer]);
        state.softmax(s, scale * log2_e, shrink);
        products_wait<0>();
        keep_in_place(o);
        free(shared.v_free[values.buffer]);
#pragma unroll
        for (int i = 0; i < HD / 2; i++) o[i] *= shrink[i / 2 % 2];
        pack(p, s);
    }
    const Turn<HD> last(block);
    shared.v_full[last.buffer].wait(last.parity);
    products_begin();
    begin_values<HD>(o, p, shared.v[last.buffer], block > 0);
    products_wait<0>();
    keep_in_place(o);

    // Out goes through the place of the worker's rows of q.
    float inverse[2];
#pragma unroll
    for (int slot = 0; slot < 2; slot++) {
        float sum = state.sum[slot];
        sum += __shfl_xor(sum, 1);
        sum += __shfl_xor(sum, 2);
        inverse[slot] = 1 / sum;
        const int t = block * rows + row + 8 * slot;
        if (lane % 4 == 0 && t < out.shape[1]) lse(batch, head, t) = state.largest[slot] * scale + logf(sum);
    }
#pragma unroll
    for (int i = 0; i < HD / 2; i += 2) {
        const int slot = i / 2 % 2, column = i / 4;  // in chunks of eight
        const SharedTile<64> to{shared.q + column / 8 * Sizes<HD>::panel};
        *reinterpret_cast<uint32_t*>(to.at(row + 8 * slot, column % 8) + lane % 4 * 4) =
            bf16_pair(o[i] * inverse[slot], o[i + 1] * inverse[slot]);
    }
    named_barrier_wait(3 + worker, warpgroup_size);
    const int first = block * rows + worker * 64;
    for (int i = thread; i < 64 * HD / 8; i += warpgroup_size) {
        const int r = i / (HD / 8), chunk = i % (HD / 8);
        const SharedTile<64> from{shared.q + chunk / 8 * Sizes<HD>::panel};
        if (first + r < out.shape[1])
            store128(row_of(out, batch, first + r, head) + 8 * chunk,
                     *reinterpret_cast<const uint4*>(from.at(worker * 64 + r, chunk % 8)));
    }
}
#endif

template <int HD>
__global__ void __launch_bounds__(Sizes<HD>::threads, 1)
    attention_forward_kernel3(View<bf16, 4> out, View<float, 3> lse, LLAMAC_KERNEL_CONSTANT const TensorMap q,
                              LLAMAC_KERNEL_CONSTANT const TensorMap k,
                              LLAMAC_KERNEL_CONSTANT const TensorMap v, int group, float scale) {
#if defined(LLAMAC_WARPGROUP_CODE)
    Shared<HD>& shared =
        *reinterpret_cast<Shared<HD>*>((reinterpret_cast<uintptr_t>(dynamic_shared_memory()) + 1023) / 1024 *
                                       1024);  // tiles begin where the swizzle does
    if (threadIdx.x == 0) {
        shared.q_full.init(1);
        for (int i = 0; i < Sizes<HD>::stages; i++) {
            shared.k_full[i].init(1), shared.v_full[i].init(1);
            // The first lane of each warp that reads.
            constexpr int readers = Sizes<HD>::workers * warpgroup_size / warp_size;
            shared.k_free[i].init(readers), shared.v_free[i].init(readers);
        }
        fence_barrier_init();
    }
    __syncthreads();
    const int blocks = static_cast<int>((out.shape[1] + Sizes<HD>::rows - 1) / Sizes<HD>::rows);
    const Piece piece = piece_of(blocks, out.shape[2]);
    const int block = blocks - 1 - static_cast<int>(piece.block);  // more keys come first
    const int head = static_cast<int>(piece.head), batch = static_cast<int>(piece.batch);
    if (threadIdx.x < warpgroup_size) {
        give_registers<24>();
        if (threadIdx.x == 0) copy_all<HD>(shared, q, k, v, block, head, head / group, batch);
    } else {
        take_registers<240>();
        compute<HD>(shared, out, lse, block, head, batch, scale);
    }
#endif
}

// [B,T,heads,HD] as TMA sees it.
TensorMap map_of(View<const bf16, 4> x, int rows) {
    return make_tensor_map(x.data, {x.shape[3], x.shape[1], x.shape[2], x.shape[0]},
                           {1, x.stride[1], x.stride[2], x.stride[0]}, rows);
}

template <int HD>
void attention_forward_hopper(View<bf16, 4> out, View<float, 3> lse, View<const bf16, 4> q,
                              View<const bf16, 4> k, View<const bf16, 4> v, float scale,
                              const Device& device) {
    constexpr int rows = Sizes<HD>::rows;
    const int64_t blocks = (q.shape[1] + rows - 1) / rows;
    launch(Grid(blocks_for(blocks * q.shape[2] * q.shape[0], 1), Sizes<HD>::threads, device.stream,
                sizeof(Shared<HD>) + 1024),
           attention_forward_kernel3<HD>, out, lse, map_of(q, rows), map_of(k, rows), map_of(v, rows),
           static_cast<int>(q.shape[2] / k.shape[2]), scale);
}

}  // namespace

void attention_forward_3(View<bf16, 4> out, View<float, 3> lse, View<const bf16, 4> q, View<const bf16, 4> k,
                         View<const bf16, 4> v, double scale, Device device) {
    (q.shape[3] == 64 ? attention_forward_hopper<64>
                      : attention_forward_hopper<128>)(out, lse, q, k, v, static_cast<float>(scale), device);
}

bool hopper_supports(const Call& call) {
    return device_properties().warpgroups && flash_supports(call);
}

}  // namespace llamac
#endif
