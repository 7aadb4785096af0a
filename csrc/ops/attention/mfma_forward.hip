// Attention forward for CDNA3 (MI300X), variant `mfma` of attention.hip. As `flash` (flash_forward.hip), but
//
//   - v is transposed on its way to LDS, once per block, so that both products read 128 bits per lane
//   - reads of k and v are issued ahead of their products, in an order that is given
//   - p is 2^(c s - c m + 1/256), cut to bf16: the factor is, on average, the half unit that cutting takes, and rounding needs
//     no instructions; out and lse take it back
//   - steps of which a block sees all keys have no checks
#include "ops/attention/mfma.h"

#if defined(LLAMAC_MFMA)
namespace llamac {
namespace {

template <int HD_>
struct MfmaForward {
    static constexpr int HD = HD_, queries = 128, keys = 64, row_tiles = 2, warp_tile_rows = 32,
                         threads = 256;
    static constexpr int key_tiles = keys / 16, value_tiles = HD / 16;
    static constexpr int ahead = 3;  // reads of LDS, before their products
    static constexpr int k_bytes = keys * HD * 2, q_bytes = queries * HD * 2;
    static constexpr int shared_bytes = q_bytes > 2 * k_bytes ? q_bytes : 2 * k_bytes;
};

using T = Tile;

// Of a lane's rows: a score that was the largest, and the sums of probabilities relative to it, by parity of the key.
template <class C>
struct MfmaRows {
    float largest[C::row_tiles];
    Pair sum[C::row_tiles];
};

// p = 2^(scale * s + shift) of a row's scores, whose sums it gives.
template <class E, class C>
__device__ Pair probabilities(T::Operand (&p)[C::key_tiles], const T::Accumulator (&s)[C::key_tiles],
                              float scale, float shift) {
    Pair sum{};
#pragma unroll
    for (int n = 0; n < C::key_tiles; n++)
#pragma unroll
        for (int w = 0; w < 2; w++) {
            const Pair score{s[n].x[2 * w], s[n].x[2 * w + 1]}, exponent = score * scale + shift;
            const Pair x{fast_exp2(exponent[0]), fast_exp2(exponent[1])};
            sum += x;
            p[n].words[w] = cut<E>(x);
        }
    return sum;
}

// Scores become probabilities relative to one that was the row's largest; o and the sums follow. As in flash, that score is
// replaced only when probabilities have become large; their sum, which is needed anyway, tells, and so it does that there
// has been no score, or none that is not hidden.
template <class E, class C>
__device__ void softmax(T::Operand (&p)[C::row_tiles][C::key_tiles],
                        const T::Accumulator (&s)[C::row_tiles][C::key_tiles],
                        T::Accumulator (&o)[C::row_tiles][C::value_tiles], MfmaRows<C>& rows, float scale) {
    Pair sum[C::row_tiles];
    bool inside = true;
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++) {
        sum[r] = probabilities<E, C>(p[r], s[r], scale, raised<E> - rows.largest[r] * scale);
        inside &= sum[r][0] + sum[r][1] <= 256;  // false for NaN, too
    }
    if (any_lane(!inside)) {
#pragma unroll
        for (int r = 0; r < C::row_tiles; r++) {
            float largest = rows.largest[r];
#pragma unroll
            for (int n = 0; n < C::key_tiles; n++)
#pragma unroll
                for (int i = 0; i < T::elements; i++) largest = fmaxf(largest, s[r][n].x[i]);
            largest = T::row_max(largest);
            const float shift = largest == -INFINITY ? 0 : largest * scale;
            const float shrink = fast_exp2(rows.largest[r] * scale - shift);
            rows.largest[r] = largest;
            rows.sum[r] *= shrink;
#pragma unroll
            for (int n = 0; n < C::value_tiles; n++)
#pragma unroll
                for (int i = 0; i < T::elements; i++) o[r][n].x[i] *= shrink;
            sum[r] = probabilities<E, C>(p[r], s[r], scale, raised<E> - shift);
        }
    }
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++) rows.sum[r] += sum[r];
}

template <class E, int HD, Masks kind>
__global__ void __launch_bounds__(MfmaForward<HD>::threads) LLAMAC_WAVES_A_SIMD(2)
    attention_forward_mfma_kernel(View<E, 4> out, View<float, 3> lse, View<const E, 4> q, View<const E, 4> k,
                                  View<const E, 4> v, AttentionMask visible, float scale) {
    using C = MfmaForward<HD>;
    constexpr bool masked = kind != no_masks;
    const int time = static_cast<int>(q.shape[1]), seen = masked ? static_cast<int>(k.shape[1]) : time;
    const int blocks = (time + C::queries - 1) / C::queries;
    const BlockTile tile = uniform_block_tile(blocks, static_cast<int>(q.shape[2]));
    const int64_t key_head =
        warp_uniform(static_cast<int>(tile.head) / static_cast<int>(q.shape[2] / k.shape[2]));
    const int first = (blocks - 1 - static_cast<int>(tile.block)) * C::queries;  // more keys come first
    const int row = warp_uniform(warp_index()) * C::warp_tile_rows;
    const SharedTile<HD> shared_q{dynamic_shared_memory()}, shared_k{dynamic_shared_memory()};
    const ColumnTile<C::keys, HD> shared_v{dynamic_shared_memory() + C::k_bytes};

    TileCopy<C::queries, HD, C::threads> copy_q;
    copy_q.begin(shared_q, row_of(q, tile.batch, first, tile.head), q.stride[1], time - first);
    copy_q.end();
    __syncthreads();
    WarpRows<T, HD, C::row_tiles, true> rows_q;
    rows_q.take(shared_q, row);
    __syncthreads();

    T::Accumulator o[C::row_tiles][C::value_tiles] = {};
    MfmaRows<C> rows;
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++) rows.largest[r] = -INFINITY, rows.sum[r] = Pair{};

    const SequenceMask<kind> sight(visible, tile.batch);
    WarpMask own(sight, first + row, C::warp_tile_rows);
    own.make_uniform();
    const int until = smaller(time, first + C::queries);
    const int begin = masked ? sight.begin(first) / C::keys * C::keys : 0;
    const int end = masked ? sight.end(until - 1) : until;
    const int k_pitch = static_cast<int>(k.stride[1]) * 2, v_pitch = static_cast<int>(v.stride[1]) * 2;
    const char* next_k = reinterpret_cast<const char*>(row_of(k, tile.batch, begin, key_head));
    const char* next_v = reinterpret_cast<const char*>(row_of(v, tile.batch, begin, key_head));
    RowsCopy<C::keys, HD, C::threads> copy_k;
    ColumnsCopy<C::keys, HD, C::threads> copy_v;
    const int kept_v = shared_v.offset(T::row(), T::group()), thread = static_cast<int>(threadIdx.x);
    copy_k.begin(next_k, k_pitch, seen - begin);
    for (int s0 = begin; s0 < end; s0 += C::keys) {
        const int before = first + row - s0;  // keys of this step that the warp's first row has before it
        const bool any = masked ? own.any(s0, C::keys) : before + C::warp_tile_rows > 0;
        copy_k.end(shared_k);
        __syncthreads();  // and the last step's v is read
        copy_v.begin(next_v, v_pitch, seen - s0, thread);
        next_k += C::keys * k_pitch, next_v += C::keys * v_pitch;
        T::Operand p[C::row_tiles][C::key_tiles];
        if (any) {
            T::Accumulator s[C::row_tiles][C::key_tiles] = {};
            add_product<E, C::ahead>(s, rows_q, shared_k);
            if constexpr (masked) {
                if (!own.all(s0, C::keys)) mask_unseen<T>(s, sight, optimization_barrier(first + row), s0);
            } else if (before < C::keys - 1) {
                mask<T, Masked::columns_after>(s, -before);
            }
            softmax<E, C>(p, s, o, rows, scale * log2_e);
        }
        copy_v.end(shared_v, thread);
        __syncthreads();  // and k is read
        if (s0 + C::keys < end) copy_k.begin(next_k, k_pitch, seen - s0 - C::keys);
        if (any) add_product<E, C::ahead>(o, p, shared_v, kept_v);
    }

    __syncthreads();  // out goes through the place of q
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++) {
        const float sum = T::row_sum(rows.sum[r][0] + rows.sum[r][1]) / raised_factor<E>, share = 1 / sum;
        const int t = first + row + r * 16 + T::row();
        if (t < time && T::group() == 0) lse(tile.batch, tile.head, t) = rows.largest[r] * scale + logf(sum);
#pragma unroll
        for (int n = 0; n < C::value_tiles; n++) {
#pragma unroll
            for (int i = 0; i < T::elements; i++) o[r][n].x[i] *= share;
            T::store_operand(shared_q, row + r * 16, n * 16, T::as_operand<E>(o[r][n]));
        }
    }
    __syncthreads();
    store_tile<C::queries, HD, C::threads>(row_of(out, tile.batch, first, tile.head), out.stride[1], shared_q,
                                           time - first);
}

template <class E>
void attention_forward_mfma(View<E, 4> out, View<float, 3> lse, View<const E, 4> q, View<const E, 4> k,
                            View<const E, 4> v, View<const int32_t, 2> first, View<const int32_t, 2> ends,
                            double scale, bool causal, int64_t window, LaunchContext context) {
    const AttentionMask visible(q, k, first, ends, causal, window);
    on_heads(visible, q, [&](auto head, auto masked) {
        constexpr int HD = decltype(head)::value;
        using C = MfmaForward<HD>;
        const int64_t blocks = (q.shape[1] + C::queries - 1) / C::queries;
        launch(Grid(blocks_for(blocks * q.shape[2] * q.shape[0], 1), C::threads, context.stream,
                    C::shared_bytes),
               attention_forward_mfma_kernel<E, HD, decltype(masked)::value>, out, lse, q, k, v, visible,
               static_cast<float>(scale));
    });
}

}  // namespace

Variant mfma_attention_forward() {
    return {
        .name = "mfma",
        .idea = "as flash on matrix cores, v transposed once per block, p without rounding, 128-bit accesses",
        .instantiations = instantiations<attention_forward_mfma<bf16>, attention_forward_mfma<fp16>>(),
        .supports = mfma_constraints,
        .chip = mfma_chip};
}

bool mfma_supports(const Call& call) {
    if (!device_properties().cdna3 || (call["HD"] != 64 && call["HD"] != 128) || !flash_supports(call))
        return false;
    bool near = true;  // RowsCopy
    for (const char* name : {"q", "k", "v", "dout"})
        for (size_t i = 0; i < call.op->operands.size(); i++)
            if (call.op->operands[i].name == name) near &= call.tensor[i].stride[1] < int64_t{1} << 23;
    return near;
}

}  // namespace llamac
#endif
