// Attention forward on matrix cores, variant 2 of attention.hip (Dao et al. 2022, FlashAttention; Dao 2023,
// FlashAttention-2). A block owns `queries` rows of one head and walks over its keys, `keys` at a time:
//
//   s = q k'                          accumulators, a warp's rows with all keys of the step
//   m = max(m, row max of s);  p = 2^(c s - c m), c = scale * log2 e;  o *= 2^(c m_old - c m)
//   o += p v                          p straight from the accumulators
//
// and at the end out = o / sum of p. Scores never leave the registers, so memory is linear in T. While the
// scores are computed the values of the step are on their way to LDS, while p v is, the next keys: one buffer
// each and two barriers a step.
#include "ops/attention/attention.h"
#include "ops/attention/flash.h"

namespace llamac {
namespace {

// Rows of a tile, warps, tiles of rows a warp, tiles of keys a step. 32 rows a warp on both kinds of machine:
// with 16, reading k and v from LDS takes longer than the products.
template <int HD_>
struct Forward {
    static constexpr int HD = HD_, R = tile_rows, warps = 4, row_tiles = 2, key_tiles = 4;
    static constexpr int warp_rows = row_tiles * R, queries = warps * warp_rows, keys = key_tiles * R;
    static constexpr int threads = threads_of(warps), depth = HD / 16, value_tiles = HD / R;
    using T = Tile<R>;
    using Shared = SharedTile<HD>;
    // q stays in LDS where it does not in registers; `out` goes through its place, or that of k and v.
    static constexpr int64_t q_bytes = Shared::bytes(queries), k_bytes = Shared::bytes(keys);
    static constexpr int64_t k_at = operands_in_registers ? 0 : q_bytes;
    static constexpr int64_t shared_bytes = k_at + 2 * k_bytes > q_bytes ? k_at + 2 * k_bytes : q_bytes;
};

// A warp's rows of the running softmax.
template <class C>
struct Rows {
    float largest[C::row_tiles][C::T::slots], sum[C::row_tiles][C::T::slots];
};

// s += q k'. kept: q's operands, where they stay in registers.
template <class C>
__device__ void add_scores(typename C::T::Accumulator (&s)[C::row_tiles][C::key_tiles], typename C::Shared q,
                           int row, typename C::Shared k, const typename C::T::Operand (*kept)[C::depth]) {
    using T = typename C::T;
#pragma unroll
    for (int d = 0; d < C::depth; d += 2) {
        typename T::Operand a[C::row_tiles][2];
#pragma unroll
        for (int r = 0; r < C::row_tiles; r++) {
            if constexpr (operands_in_registers)
                a[r][0] = kept[r][d], a[r][1] = kept[r][d + 1];
            else
                T::template load_rows<Order::any>(a[r], q, row + r * C::R, 16 * d);
        }
#pragma unroll
        for (int n = 0; n < C::key_tiles; n++) {
            typename T::Operand b[2];
            T::template load_rows<Order::any>(b, k, n * C::R, 16 * d);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int r = 0; r < C::row_tiles; r++) T::multiply(s[r][n], a[r][half], b[half]);
        }
    }
}

// Scores become probabilities relative to the largest score so far; o and the sums follow.
template <class C>
__device__ void softmax(typename C::T::Accumulator (&s)[C::row_tiles][C::key_tiles],
                        typename C::T::Accumulator (&o)[C::row_tiles][C::value_tiles], Rows<C>& rows,
                        float scale) {
    using T = typename C::T;
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++)
#pragma unroll
        for (int slot = 0; slot < T::slots; slot++) {
            float largest = rows.largest[r][slot];
#pragma unroll
            for (int n = 0; n < C::key_tiles; n++)
#pragma unroll
                for (int i = 0; i < T::elements; i++)
                    if (T::slot(i) == slot) largest = fmaxf(largest, s[r][n].x[i]);
            largest = T::row_max(largest);
            const float shift = largest * scale, shrink = fast_exp2(rows.largest[r][slot] * scale - shift);
            float sum = 0;
#pragma unroll
            for (int n = 0; n < C::key_tiles; n++)
#pragma unroll
                for (int i = 0; i < T::elements; i++)
                    if (T::slot(i) == slot)
                        sum += s[r][n].x[i] = fast_exp2(fmaf(s[r][n].x[i], scale, -shift));
            rows.largest[r][slot] = largest;
            rows.sum[r][slot] = rows.sum[r][slot] * shrink + sum;
#pragma unroll
            for (int n = 0; n < C::value_tiles; n++)
#pragma unroll
                for (int i = 0; i < T::elements; i++)
                    if (T::slot(i) == slot) o[r][n].x[i] *= shrink;
        }
}

// Scores of keys after their query are -inf. first: the key of s[.][0]'s column 0, seen from the row of
// s[0][.]'s row 0.
template <class C>
__device__ void mask(typename C::T::Accumulator (&s)[C::row_tiles][C::key_tiles], int first) {
    using T = typename C::T;
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++)
#pragma unroll
        for (int n = 0; n < C::key_tiles; n++)
#pragma unroll
            for (int i = 0; i < T::elements; i++)
                if (first + n * C::R + T::column(i) > r * C::R + T::row(T::slot(i))) s[r][n].x[i] = -INFINITY;
}

// o += p v.
template <class C>
__device__ void add_values(typename C::T::Accumulator (&o)[C::row_tiles][C::value_tiles],
                           const typename C::T::Accumulator (&p)[C::row_tiles][C::key_tiles],
                           typename C::Shared v) {
    using T = typename C::T;
#pragma unroll
    for (int j = 0; j < C::keys / 16; j++) {
        typename T::Operand a[C::row_tiles];
#pragma unroll
        for (int r = 0; r < C::row_tiles; r++) a[r] = T::as_operand(p[r][j * 16 / C::R], j % (C::R / 16));
        constexpr int width = T::template width<C::value_tiles>;
#pragma unroll
        for (int n = 0; n < C::value_tiles; n += width) {
            typename T::Operand b[width];
            T::template load_columns<Order::natural, C::value_tiles>(b, v, 16 * j, n);
#pragma unroll
            for (int w = 0; w < width; w++)
#pragma unroll
                for (int r = 0; r < C::row_tiles; r++) T::multiply(o[r][n + w], a[r], b[w]);
        }
    }
}

template <class C>
__global__ void __launch_bounds__(C::threads)
    attention_forward_kernel2(View<bf16, 4> out, View<float, 3> lse, View<const bf16, 4> q,
                              View<const bf16, 4> k, View<const bf16, 4> v, float scale) {
    using T = typename C::T;
    const int time = static_cast<int>(q.shape[1]);
    const Piece piece = piece_of((time + C::queries - 1) / C::queries, q.shape[2], true);
    const int64_t key_head = piece.head / (q.shape[2] / k.shape[2]);
    const int first = static_cast<int>(piece.block) * C::queries, row = warp_index() * C::warp_rows;
    const typename C::Shared shared_q{dynamic_shared_memory()}, shared_k{dynamic_shared_memory() + C::k_at},
        shared_v{shared_k.data + C::k_bytes};

    TileCopy<C::queries, C::HD, C::threads> copy_q;
    copy_q.begin(shared_q, row_of(q, piece.batch, first, piece.head), q.stride[1], time - first);
    copy_q.end();
    __syncthreads();
    typename T::Operand kept[operands_in_registers ? C::row_tiles : 1][C::depth];
    if constexpr (operands_in_registers) {
#pragma unroll
        for (int r = 0; r < C::row_tiles; r++)
            T::template load_rows<Order::any>(kept[r], shared_q, row + r * C::R, 0);
        __syncthreads();  // k comes in q's place
    }

    typename T::Accumulator o[C::row_tiles][C::value_tiles] = {};
    Rows<C> rows;
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++)
#pragma unroll
        for (int slot = 0; slot < T::slots; slot++) rows.largest[r][slot] = -INFINITY, rows.sum[r][slot] = 0;

    TileCopy<C::keys, C::HD, C::threads> copy_k, copy_v;
    const bf16* next_k = row_of(k, piece.batch, 0, key_head);
    const bf16* next_v = row_of(v, piece.batch, 0, key_head);
    const int end = time < first + C::queries ? time : first + C::queries;
    copy_k.begin(shared_k, next_k, k.stride[1], time);
    for (int s0 = 0; s0 < end; s0 += C::keys) {
        const int before = first + row - s0;  // keys of this step that the warp's first row has before it
        const bool any = before + C::warp_rows > 0;
        copy_k.end();
        __syncthreads();  // and nobody uses the last step's v any more
        copy_v.begin(shared_v, next_v, v.stride[1], time - s0);
        next_v += C::keys * v.stride[1];
        typename T::Accumulator s[C::row_tiles][C::key_tiles] = {};
        if (any) {
            add_scores<C>(s, shared_q, row, shared_k, kept);
            if (before < C::keys - 1) mask<C>(s, -before);
            softmax<C>(s, o, rows, scale * log2_e);
        }
        copy_v.end();
        __syncthreads();  // and nobody uses k any more
        next_k += C::keys * k.stride[1];
        if (s0 + C::keys < end) copy_k.begin(shared_k, next_k, k.stride[1], time - s0 - C::keys);
        if (any) add_values<C>(o, s, shared_v);
    }

    __syncthreads();  // out goes through the place of q, or of k and v
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++) {
#pragma unroll
        for (int slot = 0; slot < T::slots; slot++) {
            const float sum = T::row_sum(rows.sum[r][slot]);
            const int t = first + row + r * C::R + T::row(slot);
            if (t < time && T::column(0) == 0)
                lse(piece.batch, piece.head, t) = rows.largest[r][slot] * scale + logf(sum);
#pragma unroll
            for (int n = 0; n < C::value_tiles; n++)
#pragma unroll
                for (int i = 0; i < T::elements; i++)
                    if (T::slot(i) == slot) o[r][n].x[i] /= sum;
        }
        T::store_rows(shared_q, row + r * C::R, o[r]);
    }
    __syncthreads();
    store_tile<C::queries, C::HD, C::threads>(row_of(out, piece.batch, first, piece.head), out.stride[1],
                                              shared_q, time - first);
}

template <int HD>
void attention_forward_flash(View<bf16, 4> out, View<float, 3> lse, View<const bf16, 4> q,
                             View<const bf16, 4> k, View<const bf16, 4> v, double scale,
                             const Device& device) {
    using C = Forward<HD>;
    const int64_t blocks = (q.shape[1] + C::queries - 1) / C::queries;
    launch(Grid(blocks_for(blocks * q.shape[2] * q.shape[0], 1), host_threads_of(C::warps), device.stream,
                C::shared_bytes),
           attention_forward_kernel2<C>, out, lse, q, k, v, static_cast<float>(scale));
}

}  // namespace

void attention_forward_2(View<bf16, 4> out, View<float, 3> lse, View<const bf16, 4> q, View<const bf16, 4> k,
                         View<const bf16, 4> v, double scale, Device device) {
    (q.shape[3] == 64 ? attention_forward_flash<64> : attention_forward_flash<128>)(out, lse, q, k, v, scale,
                                                                                    device);
}

bool flash_supports(const Call& call) {
    if (call["NH"] % call["NKV"] != 0 || (call["HD"] != 64 && call["HD"] != 128)) return false;
    if (call["T"] > (1 << 30) || call.number("scale") <= 0) return false;
    bool whole = true;
    for (size_t i = 0; i < call.op->operands.size(); i++) {
        const Tensor& t = call.tensor[i];
        if (t.rank != 4) continue;
        whole &= t.dtype == DType::bf16 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
        for (int d = 0; d < 3; d++) whole &= t.shape[d] == 1 || t.stride[d] % 8 == 0;
    }
    return whole;
}

}  // namespace llamac
