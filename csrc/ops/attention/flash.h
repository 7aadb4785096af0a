// Shared by the tiled kernels of attention: their order of blocks and a warp's two kinds of product.
#pragma once
#include "core/device.h"
#include "ops/attention/attention.h"
#include "platform/tile.h"

namespace llamac {

constexpr float log2_e = 1.44269504088896341f;

constexpr Constraints flash_constraints{
    "HD a multiple of 8 up to 128, T and S at most 2^30, scale above 0, heads that begin at multiples of 16 "
    "bytes",
    flash_supports};

// The block tile of a block: which rows of which head. Heads come in sections; in a section the first rows of all its
// heads come first, so that the last blocks to run are short ones: which rows are first is the kernel's choice,
// those with the most work. Where blocks are distributed to XCDs in turn, each with a cache of its own, an XCD gets
// whole heads.
struct BlockTile {
    int64_t batch, head, block;
};
constexpr int section_heads = 16;
template <class Index>  // int64_t, or int where registers are few
__device__ BlockTile block_tile_of(Index blocks, Index heads, Index i, Index count) {
    const Index all = count / blocks, of_xcd = all % xcds == 0 ? all / xcds : all;
    const Index section = of_xcd % section_heads == 0 ? section_heads : of_xcd;
    Index first = 0;
    if (of_xcd != all) first = i % xcds * of_xcd, i /= xcds;
    const Index head = first + i / (section * blocks) * section + i % section;
    return {head / heads, head % heads, i % (section * blocks) / section};
}
__device__ inline BlockTile block_tile_of(int64_t blocks, int64_t heads) {
    return block_tile_of<int64_t>(blocks, heads, blockIdx.x, gridDim.x);
}

__device__ inline int smaller(int a, int b) {
    return a < b ? a : b;
}
__device__ inline int larger(int a, int b) {
    return a > b ? a : b;
}

// The first of `count` for which a condition holds that holds for all after it too.
template <class Condition>
__device__ int first_where(int count, Condition holds) {
    int low = 0, high = count;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (holds(middle))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// What kernels are compiled for: each query sees all keys up to its own, of as many; masks beside the diagonal; no diagonal.
enum Masks : int { no_masks, causal_masks, range_masks };

// The keys that the queries of one sequence see, in kernels with masks; rows behind the last query see its keys.
template <Masks kind>
struct SequenceMask {
    static constexpr bool causal = kind != range_masks;
    // [B,T], or null: as the kernel gets them, or the compiler cannot tell memory from LDS.
    const int32_t *first, *ends;
    int64_t sequence;  // where the sequence's begin
    int queries, keys, window;

    __device__ SequenceMask(const AttentionMask& v, int64_t batch)
        : SequenceMask(v, batch, static_cast<int>(v.queries), static_cast<int>(v.keys)) {}
    // queries, keys: those of v, which the kernel has in registers.
    __device__ SequenceMask(const AttentionMask& v, int64_t batch, int queries_, int keys_)
        : first(v.first),
          ends(v.ends),
          sequence(batch * queries_),
          queries(queries_),
          keys(keys_),
          window(static_cast<int>(v.window < keys_ ? v.window : 0)) {}
    __device__ int existing(int t) const { return t < queries ? t : queries - 1; }
    __device__ int begin(int t) const {
        t = existing(t);
        const int own = keys - queries + t;
        int from = window > 0 ? own - window + 1 : 0;
        if (first) from = larger(from, smaller(first[sequence + t], own));  // the values are not checked
        return larger(from, 0);
    }
    __device__ int end(int t) const {
        t = existing(t);
        const int behind_own = keys - queries + t + 1;
        if (causal || !ends) return causal ? behind_own : keys;
        return smaller(larger(larger(ends[sequence + t], behind_own), 1), keys);
    }
    // The first query that sees a key if none is hidden, and the first behind the last one. begin() and end() rise from query to
    // query.
    __device__ int first_query(int key) const {
        if (causal || !ends) return causal ? larger(0, key - (keys - queries)) : 0;
        return first_where(queries, [&](int t) { return end(t) > key; });
    }
    __device__ int queries_until(int key) const {
        return first_where(queries, [&](int t) { return begin(t) > key; });
    }
};
// Which steps a warp takes part in, and of which of them its queries do not see all: [some_from, some_to) the keys that
// one of them sees, [all_from, all_to) those that all see.
struct WarpMask {
    int some_from, all_from, all_to, some_to;
    __device__ WarpMask(const auto& sight, int query, int rows)
        : some_from(sight.begin(query)),
          all_from(sight.begin(query + rows - 1)),
          all_to(sight.end(query)),
          some_to(sight.end(query + rows - 1)) {}
    // The same in scalar registers: all lanes of the warp call it.
    __device__ void make_uniform() {
        some_from = warp_uniform(some_from), all_from = warp_uniform(all_from);
        all_to = warp_uniform(all_to), some_to = warp_uniform(some_to);
    }
    __device__ bool any(int key, int keys) const { return key + keys > some_from && key < some_to; }
    __device__ bool all(int key, int keys) const { return key >= all_from && key + keys <= all_to; }
};

// Whether the kernels without masks refuse a call: it has a mask beside the diagonal, or heads narrower than the tiles.
template <int HD, class E>
bool needs_mask(const AttentionMask& v, const View<const E, 4>& q) {
    return !v.causal || !v.is_plain() || q.shape[3] != HD;
}
// f(tile's head size, Masks) for the heads of the call.
template <class E, class F>
void on_heads(const AttentionMask& v, const View<const E, 4>& q, F f) {
    const auto choose = [&](auto head) {
        if (!needs_mask<decltype(head)::value>(v, q))
            f(head, std::integral_constant<Masks, no_masks>{});
        else if (v.causal)
            f(head, std::integral_constant<Masks, causal_masks>{});
        else
            f(head, std::integral_constant<Masks, range_masks>{});
    };
    if (q.shape[3] <= 64)
        choose(std::integral_constant<int, 64>{});
    else
        choose(std::integral_constant<int, 128>{});
}

// The first element of a head's row.
template <class T>
__device__ T* row_of(const View<T, 4>& x, int64_t batch, int64_t row, int64_t head) {
    return x.data + batch * x.stride[0] + row * x.stride[1] + head * x.stride[2];
}

// delta = sum_d dout * out of one row, in each lane of the group of HD / 8 that calls it, 128 bits a lane; 0 where
// the row is not `inside`.
template <int HD, class E>
__device__ float row_delta(const View<const E, 4>& dout, const View<const E, 4>& out, int64_t batch,
                           int64_t row, int64_t head, bool inside) {
    constexpr int lanes = HD / vector_size<E>;
    const int first = static_cast<int>(threadIdx.x) % lanes * vector_size<E>;
    float sum = 0;
    if (inside && first < out.shape[3]) {
        float x[vector_size<E>], y[vector_size<E>];
        unpack<E>(load128(row_of(dout, batch, row, head) + first), x);
        unpack<E>(load128(row_of(out, batch, row, head) + first), y);
        for (int e = 0; e < vector_size<E>; e++) sum += x[e] * y[e];
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor(sum, distance);
    return sum;
}

// A warp's rows of an operand that stays the same through a loop: in registers where there are enough, else
// in LDS. Where they are, their place in LDS is free after the next __syncthreads.
template <class T, int HD, int row_tiles, bool kept = Machine::operands_in_registers>
struct WarpRows {
    SharedTile<HD> tile;
    int first;
    typename T::Operand operands[kept ? row_tiles : 1][HD / 16];

    __device__ void take(SharedTile<HD> from, int row) {
        tile = from, first = row;
        if constexpr (kept) {
#pragma unroll
            for (int r = 0; r < row_tiles; r++) T::load_rows(operands[r], from, row + r * tile_rows, 0);
        }
    }
    // Operands from d on of a tile of rows.
    __device__ void get(typename T::Operand (&out)[T::depth], int r, int d) const {
        if constexpr (kept) {
#pragma unroll
            for (int i = 0; i < T::depth; i++) out[i] = operands[r][d + i];
        } else
            T::load_rows(out, tile, first + r * tile_rows, 16 * d);
    }
};

// c += a b': rows with rows.
template <class T, class E, int HD, int row_tiles, bool kept, int count>
__device__ void add_rows_product(typename T::Accumulator (&c)[row_tiles][count],
                                 const WarpRows<T, HD, row_tiles, kept>& a, SharedTile<HD> b) {
#pragma unroll
    for (int d = 0; d < HD / 16; d += T::depth) {
        typename T::Operand rows[row_tiles][T::depth];
#pragma unroll
        for (int r = 0; r < row_tiles; r++) a.get(rows[r], r, d);
#pragma unroll
        for (int n = 0; n < count; n++) {
            typename T::RightOperand columns[T::depth];
            T::load_rows(columns, b, n * tile_rows, 16 * d);
#pragma unroll
            for (int i = 0; i < T::depth; i++)
#pragma unroll
                for (int r = 0; r < row_tiles; r++) T::template multiply<E>(c[r][n], rows[r][i], columns[i]);
            if constexpr (std::is_same_v<Machine, Wmma>) scheduling_barrier();
        }
    }
}

// Scores that causality forbids are -inf: those whose column comes after its row, or before. first: how far
// column 0 of c[.][0] is after row 0 of c[0][.].
enum class Masked { columns_after, columns_before };
template <class T, Masked forbidden, int row_tiles, int count>
__device__ void mask(typename T::Accumulator (&c)[row_tiles][count], int first) {
#pragma unroll
    for (int r = 0; r < row_tiles; r++)
#pragma unroll
        for (int n = 0; n < count; n++)
#pragma unroll
            for (int i = 0; i < T::elements; i++) {
                const int column = first + n * tile_rows + T::column(i);
                const int row = r * tile_rows + T::row(T::slot(i));
                if (forbidden == Masked::columns_after ? column > row : column < row)
                    c[r][n].x[i] = -INFINITY;
            }
}

// The score x of the key `at` is -inf unless its query sees it: [begin, end). One comparison, and the barrier: the
// compiler would carry the choice of each score, 64 bits on CDNA, out of the branch around the mask.
__device__ inline void hide_unseen(float& x, int begin, int end, int at) {
    if (static_cast<unsigned>(at - begin) >= static_cast<unsigned>(end - begin)) x = -INFINITY;
    x = __uint_as_float(optimization_barrier(__float_as_uint(x)));
}
// The same for scores whose rows are queries, by the keys that they see; query and key: those of row and column 0.
template <class T, int row_tiles, int count>
__device__ void mask_unseen(typename T::Accumulator (&c)[row_tiles][count], const auto& sight, int query,
                            int key) {
#pragma unroll
    for (int r = 0; r < row_tiles; r++)
#pragma unroll
        for (int slot = 0; slot < T::slots; slot++) {
            const int t = query + r * tile_rows + T::row(slot), begin = sight.begin(t), end = sight.end(t);
#pragma unroll
            for (int n = 0; n < count; n++)
#pragma unroll
                for (int i = 0; i < T::elements; i++)
                    if (T::slot(i) == slot)
                        hide_unseen(c[r][n].x[i], begin, end, key + n * tile_rows + T::column(i));
        }
}
// The same where columns are queries; key: that of row 0, begin and end: of each column.
template <class T, int row_tiles, int count>
__device__ void mask_unseen(typename T::Accumulator (&c)[row_tiles][count], int key, const int* begin,
                            const int* end) {
#pragma unroll
    for (int n = 0; n < count; n++)
#pragma unroll
        for (int i = 0; i < T::elements; i++) {
            const int column = n * tile_rows + T::column(i), from = begin[column], until = end[column];
#pragma unroll
            for (int r = 0; r < row_tiles; r++)
                hide_unseen(c[r][n].x[i], from, until, key + r * tile_rows + T::row(T::slot(i)));
        }
}

// Accumulators as the operands of another product: their columns become k.
template <class T, class E, int row_tiles, int depth>
struct Packed {
    typename T::Operand operands[row_tiles][depth];
    __device__ explicit Packed(const typename T::Accumulator (&c)[row_tiles][depth]) {
#pragma unroll
        for (int r = 0; r < row_tiles; r++)
#pragma unroll
            for (int d = 0; d < depth; d++) operands[r][d] = T::template as_operand<E>(c[r][d]);
    }
};

// c += p b.
template <class T, class E, int HD, int row_tiles, int depth, int count>
__device__ void add_columns_product(typename T::Accumulator (&c)[row_tiles][count],
                                    const Packed<T, E, row_tiles, depth>& p, SharedTile<HD> b) {
    static_assert(tile_rows == 16 && count * tile_rows == HD);
    constexpr int width = T::template width<count>;
#pragma unroll
    for (int d = 0; d < depth; d++)
#pragma unroll
        for (int n = 0; n < count; n += width) {
            typename T::RightOperand columns[width];
            T::template load_columns<Order::natural, count>(columns, b, 16 * d, n);
#pragma unroll
            for (int w = 0; w < width; w++)
#pragma unroll
                for (int r = 0; r < row_tiles; r++)
                    T::template multiply<E>(c[r][n + w], p.operands[r][d], columns[w]);
            if constexpr (std::is_same_v<Machine, Wmma>) scheduling_barrier();
        }
}

}  // namespace llamac
