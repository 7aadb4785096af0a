// Attention forward on matrix cores, variant `flash` of attention.hip (Dao et al. 2022, FlashAttention; Dao 2023,
// FlashAttention-2). A block owns `queries` rows of one head and walks over its keys, `keys` at a time:
//
//   s = q k'                          accumulators, a warp's rows with all keys of the step
//   m = max(m, row max of s);  p = 2^(c s - c m), c = scale * log2 e;  o *= 2^(c m_old - c m)
//   o += p v                          p straight from the accumulators
//
// and at the end out = o / sum of p. Scores never leave the registers, so memory is linear in T. Keys and values are copied to
// LDS while others are computed with: in two stages each, or, in one, the values during the scores, the next keys during p v.
//
// With masks (documents, windows, other keys than queries) the walk begins with the first key that one of the block's queries
// sees, a warp leaves out the steps of which its queries see nothing, and only steps at an edge hide scores. A kernel of its own
// does this, also for heads that are narrower than its tiles, which are filled with zeros.
#include "ops/attention/attention.h"
#include "ops/attention/flash.h"

namespace llamac {
namespace {

// `queries` rows a block, `keys` a step. 32 rows a warp: with 16, reading k and v from LDS takes longer than
// the products; WMMA's accumulators leave no room for more. stages 2: both tiles of a step are on their way
// during all of the step before, and it has one barrier; MI300X's LDS would hold half as many blocks then.
template <int HD_, class M = Machine>
struct Forward {
    static constexpr bool small = std::is_same_v<M, Wmma>;
    static constexpr int HD = HD_, R = 16, queries = 128, keys = small ? 32 : 64;
    static constexpr int row_tiles = small ? 1 : 2, warp_rows = row_tiles * R;
    static constexpr int threads = queries / warp_rows * M::warp;
    static constexpr int key_tiles = keys / R, value_tiles = HD / R;
    static constexpr int stages = std::is_same_v<M, MmaSync> ? 2 : 1;
    static constexpr bool q_kept = M::operands_in_registers || (HD == 64 && !small);
    // q's place serves k and v where q is in registers; in the end out goes through it.
    static constexpr int q_bytes = queries * HD * 2, k_bytes = keys * HD * 2;
    static constexpr int k_at = q_kept ? 0 : q_bytes, steps_end = k_at + stages * 2 * k_bytes;
    static constexpr int shared_bytes = steps_end > q_bytes ? steps_end : q_bytes;
};
using T = Tile;

// A warp's rows of the running softmax.
template <class C>
struct Rows {
    float largest[C::row_tiles][T::slots], sum[C::row_tiles][T::slots];
};

// Scores become probabilities relative to a score that was the row's largest; o and the sums follow. That score
// is replaced only when one of the warp's rows has got a score that gives more than 2^8, which o and sum stand
// easily: most steps then rescale nothing (Zadouri et al., FlashAttention-4).
// hides: a row's scores may all be hidden so far.
template <class C, bool hides>
__device__ void softmax(T::Accumulator (&s)[C::row_tiles][C::key_tiles],
                        T::Accumulator (&o)[C::row_tiles][C::value_tiles], Rows<C>& rows, float scale) {
    float largest[C::row_tiles][T::slots];
    bool outgrown = false;
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++)
#pragma unroll
        for (int slot = 0; slot < T::slots; slot++) {
            largest[r][slot] = rows.largest[r][slot];
#pragma unroll
            for (int n = 0; n < C::key_tiles; n++)
#pragma unroll
                for (int i = 0; i < T::elements; i++)
                    if (T::slot(i) == slot) largest[r][slot] = fmaxf(largest[r][slot], s[r][n].x[i]);
            outgrown |= (largest[r][slot] - rows.largest[r][slot]) * scale > 8;
        }
    // -inf - -inf compares as false: lanes whose keys are all masked.
    if (any_lane(outgrown)) {
#pragma unroll
        for (int r = 0; r < C::row_tiles; r++)
#pragma unroll
            for (int slot = 0; slot < T::slots; slot++) {
                const float now = T::row_max(largest[r][slot]);
                const float shrink =
                    hides && now == -INFINITY ? 1 : fast_exp2((rows.largest[r][slot] - now) * scale);
                rows.largest[r][slot] = now;
                rows.sum[r][slot] *= shrink;
#pragma unroll
                for (int n = 0; n < C::value_tiles; n++)
#pragma unroll
                    for (int i = 0; i < T::elements; i++)
                        if (T::slot(i) == slot) o[r][n].x[i] *= shrink;
            }
    }
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++)
#pragma unroll
        for (int slot = 0; slot < T::slots; slot++) {
            const float shift =
                hides && rows.largest[r][slot] == -INFINITY ? 0 : rows.largest[r][slot] * scale;
            float sum = 0;
#pragma unroll
            for (int n = 0; n < C::key_tiles; n++)
#pragma unroll
                for (int i = 0; i < T::elements; i++)
                    if (T::slot(i) == slot)
                        sum += s[r][n].x[i] = fast_exp2(fmaf(s[r][n].x[i], scale, -shift));
            rows.sum[r][slot] += sum;
        }
}

template <class E, int HD, Masks kind>
__global__ void __launch_bounds__(Forward<HD>::threads) LLAMAC_WAVES_A_SIMD(2)
    attention_forward_flash_kernel(View<E, 4> out, View<float, 3> lse, View<const E, 4> q, View<const E, 4> k,
                                   View<const E, 4> v, AttentionMask visible, float scale) {
    using C = Forward<HD>;
    constexpr bool masked = kind != no_masks;
    const int time = static_cast<int>(q.shape[1]), seen = masked ? static_cast<int>(k.shape[1]) : time;
    const int width = masked ? static_cast<int>(q.shape[3]) : HD;
    const BlockTile tile = block_tile_of((time + C::queries - 1) / C::queries, q.shape[2]);
    const int64_t key_head = tile.head / (q.shape[2] / k.shape[2]);
    const int blocks = (time + C::queries - 1) / C::queries;
    const int first = (blocks - 1 - static_cast<int>(tile.block)) * C::queries;  // more keys come first
    const int row = warp_index() * C::warp_rows;
    const SharedTile<HD> shared_q{dynamic_shared_memory()}, shared_k{dynamic_shared_memory() + C::k_at},
        shared_v{shared_k.data + C::k_bytes};

    TileCopy<C::queries, HD, C::threads> copy_q;
    copy_q.begin(shared_q, row_of(q, tile.batch, first, tile.head), q.stride[1], time - first, width);
    copy_q.end();
    __syncthreads();
    WarpRows<T, HD, C::row_tiles, C::q_kept> rows_q;
    rows_q.take(shared_q, row);
    __syncthreads();

    T::Accumulator o[C::row_tiles][C::value_tiles] = {};
    Rows<C> rows;
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++)
#pragma unroll
        for (int slot = 0; slot < T::slots; slot++) rows.largest[r][slot] = -INFINITY, rows.sum[r][slot] = 0;

    const SequenceMask<kind> sight(visible, tile.batch);
    const WarpMask own(sight, first + row, C::warp_rows);
    const int until = time < first + C::queries ? time : first + C::queries;
    const int begin = masked ? sight.begin(first) / C::keys * C::keys : 0;
    const int end = masked ? sight.end(until - 1) : until;
    TileCopy<C::keys, HD, C::threads> copy_k, copy_v;
    const E* next_k = row_of(k, tile.batch, begin, key_head);
    const E* next_v = row_of(v, tile.batch, begin, key_head);
    const auto begin_k = [&](int stage, int valid) {
        copy_k.begin({shared_k.data + stage}, next_k, k.stride[1], valid, width);
        next_k += C::keys * k.stride[1];
    };
    const auto begin_v = [&](int stage, int valid) {
        copy_v.begin({shared_v.data + stage}, next_v, v.stride[1], valid, width);
        next_v += C::keys * v.stride[1];
    };
    const int first_stage = begin / C::keys % C::stages * 2 * C::k_bytes;
    begin_k(first_stage, seen - begin);
    if (C::stages == 2) begin_v(first_stage, seen - begin);
    for (int s0 = begin; s0 < end; s0 += C::keys) {
        const int stage = s0 / C::keys % C::stages * 2 * C::k_bytes, next = s0 + C::keys;
        const int before = first + row - s0;  // keys of this step that the warp's first row has before it
        const bool any = masked ? own.any(s0, C::keys) : before + C::warp_rows > 0;
        copy_k.end();
        if (C::stages == 2) copy_v.end();
        __syncthreads();  // and the last step's v is read
        if (C::stages == 2 && next < end) {
            begin_k(2 * C::k_bytes - stage, seen - next);
            begin_v(2 * C::k_bytes - stage, seen - next);
        } else if (C::stages == 1)
            begin_v(0, seen - s0);
        if (C::stages == 2 && !any) continue;  // of one stage the barrier below is still to come
        T::Accumulator s[C::row_tiles][C::key_tiles] = {};
        if (any) {
            set_priority<1>();  // of two waves of a SIMD the one in its products goes first
            add_rows_product<T, E>(s, rows_q, SharedTile<HD>{shared_k.data + stage});
            set_priority<0>();
            if constexpr (masked) {
                if (!own.all(s0, C::keys)) mask_unseen<T>(s, sight, first + row, s0);
            } else if (before < C::keys - 1) {
                mask<T, Masked::columns_after>(s, -before);
            }
            softmax<C, masked>(s, o, rows, scale * log2_e);
        }
        const Packed<T, E, C::row_tiles, C::key_tiles> p(s);
        if (C::stages == 1) {
            copy_v.end();
            __syncthreads();  // and k is read
            if (next < end) begin_k(0, seen - next);
        }
        set_priority<1>();
        if (any) add_columns_product<T>(o, p, SharedTile<HD>{shared_v.data + stage});
        set_priority<0>();
    }

    __syncthreads();  // out goes through the place of q, or of k and v
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++) {
#pragma unroll
        for (int slot = 0; slot < T::slots; slot++) {
            const float sum = T::row_sum(rows.sum[r][slot]), share = 1 / sum;
            const int t = first + row + r * C::R + T::row(slot);
            if (t < time && T::column(0) == 0)
                lse(tile.batch, tile.head, t) = rows.largest[r][slot] * scale + logf(sum);
#pragma unroll
            for (int n = 0; n < C::value_tiles; n++)
#pragma unroll
                for (int i = 0; i < T::elements; i++)
                    if (T::slot(i) == slot) o[r][n].x[i] *= share;
        }
        T::store_rows<E>(shared_q, row + r * C::R, o[r]);
    }
    __syncthreads();
    store_tile<C::queries, HD, C::threads>(row_of(out, tile.batch, first, tile.head), out.stride[1], shared_q,
                                           time - first, width);
}

template <class E>
void attention_forward_flash(View<E, 4> out, View<float, 3> lse, View<const E, 4> q, View<const E, 4> k,
                             View<const E, 4> v, View<const int32_t, 2> first, View<const int32_t, 2> ends,
                             double scale, bool causal, int64_t window, LaunchContext context) {
    const AttentionMask visible(q, k, first, ends, causal, window);
    on_heads(visible, q, [&](auto head, auto masked) {
        constexpr int HD = decltype(head)::value;
        on_machine([&](auto machine) {
            using C = Forward<HD, decltype(machine)>;
            const int64_t blocks = (q.shape[1] + C::queries - 1) / C::queries;
            launch(Grid(blocks_for(blocks * q.shape[2] * q.shape[0], 1), C::threads, context.stream,
                        C::shared_bytes),
                   attention_forward_flash_kernel<E, HD, decltype(masked)::value>, out, lse, q, k, v, visible,
                   static_cast<float>(scale));
        });
    });
}

}  // namespace

Variant flash_attention_forward() {
    return {"flash", "tiles on matrix cores, running softmax, 128-bit accesses",
            instantiations<attention_forward_flash<bf16>, attention_forward_flash<fp16>>(),
            flash_constraints};
}

bool flash_supports(const Call& call) {
    if (call["HD"] % 8 || call["HD"] > 128) return false;
    if (call["T"] > (1 << 30) || call["S"] > (1 << 30) || call.number("scale") <= 0) return false;
    bool whole = true;
    for (size_t i = 0; i < call.op->operands.size(); i++) {
        const Tensor& t = call.tensor[i];
        if (t.rank != 4) continue;
        whole &= size_of(t.dtype) == 2 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
        for (int d = 0; d < 3; d++) whole &= t.shape[d] == 1 || t.stride[d] % 8 == 0;
        whole &= t.stride[1] < int64_t{1} << 31;  // tile_copy.h counts rows so
    }
    return whole;
}

}  // namespace llamac
