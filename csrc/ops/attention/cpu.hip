// Attention on the host's vector units: the `cpu` variants of attention.hip.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "core/cpu_gemm.h"
#include "core/simd.h"
#include "ops/attention/attention.h"

namespace llamac {
namespace {

template <class A>
constexpr A minus_infinity = -std::numeric_limits<A>::infinity();

int64_t round_up(int64_t n, int64_t to) {
    return (n + to - 1) / to * to;
}

template <class A>
constexpr int64_t panel_columns = 2 * lanes<A>;
constexpr int64_t tile_queries = 64;  // a multiple of tile_rows

inline float exponential(float x) {
    return fast_exp(x);
}
inline double exponential(double x) {
    return std::exp(x);
}

// The lanes of a vector combined pairwise.
template <class A, class Combine>
A across(vector<A> v, Combine combine) {
    A lane[lanes<A>];
    store(lane, v);
    for (int64_t half = lanes<A> / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; i++) lane[i] = combine(lane[i], lane[i + half]);
    return lane[0];
}
template <class A>
A sum_across(vector<A> v) {
    return across<A>(v, [](A a, A b) { return a + b; });
}

// Sizes of one call; scores of a tile are rows `scores_row` apart: keys rounded up to whole panels, and a
// vector more, so that rows a power of two apart do not meet in the same cache set.
template <class A>
struct Sizes {
    int64_t B, T, S, NH, NKV, HD, group, width, keys, scores_row, tiles;

    Sizes(const int64_t* q_shape, const int64_t* k_shape)
        : B(q_shape[0]),
          T(q_shape[1]),
          S(k_shape[1]),
          NH(q_shape[2]),
          NKV(k_shape[2]),
          HD(q_shape[3]),
          group(NH / NKV),
          width(round_up(HD, panel_columns<A>)),
          keys(round_up(S, panel_columns<A>)),
          scores_row(keys + lanes<A>),
          tiles((T + tile_queries - 1) / tile_queries) {}
};

// x[b, :, g, :] as rows[keys][width], zeros where x has no element. Not scaled: a product of two bf16 numbers
// is exact in f32, that of a scaled one is not.
template <class A, class T>
void copy_rows(View<const T, 4> x, int64_t b, int64_t g, int64_t begin, int64_t count, int64_t width,
               A* rows) {
    const int64_t HD = x.shape[3], there = std::max<int64_t>(0, std::min(count, x.shape[1] - begin));
    for (int64_t t = 0; t < there; t++) {
        const T* from = &x(b, begin + t, g, 0);
        A* row = rows + t * width;
        for (int64_t d = 0; d < HD; d++) row[d] = A(from[d]);
        std::fill(row + HD, row + width, A(0));
    }
    std::fill(rows + there * width, rows + count * width, A(0));
}

// Columns [0, panel_columns) of the transpose of rows[panel_columns][width]: panel[HD][panel_columns].
template <class A>
void transpose_panel(const A* rows, int64_t width, int64_t HD, A* panel) {
    for (int64_t d = 0; d < HD; d++)
        for (int64_t s = 0; s < panel_columns<A>; s++) panel[d * panel_columns<A> + s] = rows[s * width + d];
}

// Key or value heads as gemm_tile wants them: rows [B,NKV,keys,width], and, transposed in panels of
// panel_columns keys, [B,NKV,keys/panel_columns,HD,panel_columns].
template <class A, class T>
void pack_heads(View<const T, 4> x, const Sizes<A>& n, A* rows, A* panels) {
#pragma omp for collapse(2) schedule(static)
    for (int64_t head = 0; head < n.B * n.NKV; head++)
        for (int64_t s = 0; s < n.keys; s += panel_columns<A>) {
            A* at = rows + (head * n.keys + s) * n.width;
            copy_rows(x, head / n.NKV, head % n.NKV, s, panel_columns<A>, n.width, at);
            if (panels) transpose_panel(at, n.width, n.HD, panels + (head * n.keys + s) * n.HD);
        }
}

// The queries of one tile, from `first` on, and the keys that each sees, which rise from query to query. Scores of a
// register tile of rows stand for the keys [low, high): those that one of its queries sees, in whole panels and vectors.
template <class A>
struct QueryTile {
    int64_t first, count, begin[tile_queries], end[tile_queries];

    QueryTile(const AttentionMask& visible, int64_t b, int64_t first_)
        : first(first_), count(std::min(visible.queries - first, tile_queries)) {
        for (int64_t i = 0; i < tile_queries; i++) {  // rows behind the last query see its keys
            const int64_t t = first + std::min(i, count - 1);
            begin[i] = visible.begin(b, t);
            end[i] = visible.end(b, t);
        }
    }
    static int64_t register_tile(int64_t row) { return row / tile_rows * tile_rows; }
    int64_t low(int64_t row) const { return begin[register_tile(row)] / panel_columns<A> * panel_columns<A>; }
    int64_t high(int64_t row) const {
        return round_up(end[register_tile(row) + tile_rows - 1], std::max<int64_t>(lanes<A>, tile_rows));
    }
};

// c[queries, keys] = rows * transposed panels, for the register tiles that a query sees something of.
template <class A>
void visible_scores(const Sizes<A>& n, const QueryTile<A>& tile, const A* rows, const A* panels, A* c) {
    const A* nothing = nullptr;
    for (int64_t s = tile.low(0); s < tile.high(tile.count - 1); s += panel_columns<A>)
        for (int64_t i = 0; i < tile.count && tile.low(i) <= s; i += tile_rows)
            if (s < tile.high(i))
                gemm_tile<2>(n.HD, rows + i * n.width, n.width, 1, panels + s * n.HD, panel_columns<A>,
                             nothing, 0, c + i * n.scores_row + s, n.scores_row);
}

// c[queries, width] = p * rows: p is zero where a query of the register tile sees nothing.
template <class A>
void visible_product(const Sizes<A>& n, const QueryTile<A>& tile, const A* p, const A* rows, A* c) {
    const A* nothing = nullptr;
    for (int64_t i = 0; i < tile.count; i += tile_rows)
        for (int64_t d = 0; d < n.width; d += panel_columns<A>)
            gemm_tile<2>(tile.high(i) - tile.low(i), p + i * n.scores_row + tile.low(i), n.scores_row, 1,
                         rows + tile.low(i) * n.width + d, n.width, nothing, 0, c + i * n.width + d, n.width);
}

// c[keys, width] += transposed p * rows of the tile's queries.
template <class A>
void visible_transposed_product(const Sizes<A>& n, const QueryTile<A>& tile, const A* p, const A* rows,
                                A* c) {
    int64_t begin = 0, end = 0;  // the queries that see one of the keys
    for (int64_t s = tile.low(0); s < tile.end[tile.count - 1]; s += tile_rows) {
        while (tile.end[begin] <= s) begin++;
        while (end < tile.count && tile.begin[end] < s + tile_rows) end++;
        for (int64_t d = 0; begin < end && d < n.width; d += panel_columns<A>) {
            A* at = c + s * n.width + d;
            gemm_tile<2>(end - begin, p + begin * n.scores_row + s, 1, n.scores_row,
                         rows + begin * n.width + d, n.width, at, n.width, at, n.width);
        }
    }
}

// Scales a query's scores, in whole vectors: one at a time, the last few keys would cost as much as all others. Those of
// keys that it does not see become -inf, so that p and ds are 0 there.
template <class A>
void scale_and_mask(const QueryTile<A>& tile, int64_t i, A* row, A scale) {
    std::fill(row + tile.low(i), row + tile.begin[i], minus_infinity<A>);
    for (int64_t s = tile.begin[i]; s < tile.end[i]; s++) row[s] *= scale;
    std::fill(row + tile.end[i], row + tile.high(i), minus_infinity<A>);
}

// Makes query i's row of scores e^(scale * row - largest); returns the largest, and the sum of the powers.
template <class A>
std::pair<A, A> softmax_row(const QueryTile<A>& tile, int64_t i, A* row, A scale) {
    scale_and_mask(tile, i, row, scale);
    const int64_t low = tile.low(i), high = tile.high(i);
    vector<A> largest = load(row + low), sum = {};
    for (int64_t s = low + lanes<A>; s < high; s += lanes<A>) {
        const vector<A> x = load(row + s);
        largest = x > largest ? x : largest;
    }
    const A shift = across<A>(largest, [](A a, A b) { return std::max(a, b); });
#pragma omp simd
    for (int64_t s = low; s < high; s++) row[s] = exponential(row[s] - shift);
    for (int64_t s = low; s < high; s += lanes<A>) sum += load(row + s);
    return {shift, sum_across<A>(sum)};
}

// Makes p, which holds products q*k of query i, the probabilities, and ds, which holds dp, the gradient of the
// products. delta is the mean of dp weighted by p: where one key takes all, ds comes out as 0, whatever lse lost to
// rounding.
template <class A>
void softmax_row_backward(const QueryTile<A>& tile, int64_t i, A* p, A* ds, A lse, A scale) {
    scale_and_mask(tile, i, p, scale);
    const int64_t low = tile.low(i), high = tile.high(i);
#pragma omp simd
    for (int64_t s = low; s < high; s++) p[s] = exponential(p[s] - lse);
    vector<A> sum = {}, weighted = {};
    for (int64_t s = low; s < high; s += lanes<A>) {
        sum += load(p + s);
        weighted += load(p + s) * load(ds + s);
    }
    const A delta = sum_across<A>(weighted) / sum_across<A>(sum);
    for (int64_t s = low; s < high; s += lanes<A>)
        store(ds + s, scale * load(p + s) * (load(ds + s) - delta));
}

// Gradients of one tile of queries of head h: dq is written, dkeys and dvalues [keys,width] are added to.
// scratch: tile_queries * (2 * scores_row + 3 * width).
template <class T, class A>
void backward_tile(const Sizes<A>& n, int64_t b, int64_t h, const QueryTile<A>& tile, View<T, 4> dq,
                   View<const T, 4> dout, View<const A, 3> lse, View<const T, 4> q, A scale, const A* keys,
                   const A* keys_transposed, const A* values_transposed, A* dkeys, A* dvalues, A* scratch) {
    const int64_t first = tile.first;
    A *p = scratch, *ds = p + tile_queries * n.scores_row, *queries = ds + tile_queries * n.scores_row;
    A *douts = queries + tile_queries * n.width, *dqueries = douts + tile_queries * n.width;
    copy_rows(q, b, h, first, tile_queries, n.width, queries);
    copy_rows(dout, b, h, first, tile_queries, n.width, douts);
    visible_scores(n, tile, queries, keys_transposed, p);
    visible_scores(n, tile, douts, values_transposed, ds);
    for (int64_t i = 0; i < tile.count; i++)
        softmax_row_backward(tile, i, p + i * n.scores_row, ds + i * n.scores_row, lse(b, h, first + i),
                             scale);
    visible_transposed_product(n, tile, p, douts, dvalues);
    visible_transposed_product(n, tile, ds, queries, dkeys);
    visible_product(n, tile, ds, keys, dqueries);
    for (int64_t i = 0; i < tile.count; i++) {
        T* to = &dq(b, first + i, h, 0);
        for (int64_t d = 0; d < n.HD; d++) to[d] = T(dqueries[i * n.width + d]);
    }
}

// x[b, :, g, :] = the sum of its parts, in their order; parts lie part_stride apart.
template <class T, class A>
void sum_parts(const Sizes<A>& n, int64_t parts, int64_t part_stride, const A* sums, View<T, 4> x) {
#pragma omp for collapse(2) schedule(static)
    for (int64_t head = 0; head < n.B * n.NKV; head++)
        for (int64_t s = 0; s < n.S; s++) {
            const A* from = sums + head * parts * part_stride + s * n.width;
            T* to = &x(head / n.NKV, s, head % n.NKV, 0);
            for (int64_t d = 0; d < n.HD; d++) {
                A sum = from[d];
                for (int64_t part = 1; part < parts; part++) sum += from[part * part_stride + d];
                to[d] = T(sum);
            }
        }
}

template <class T>
void attention_forward_cpu(View<T, 4> out, View<arithmetic<T>, 3> lse, View<const T, 4> q, View<const T, 4> k,
                           View<const T, 4> v, View<const int32_t, 2> first_seen, View<const int32_t, 2> ends,
                           double scale, bool causal, int64_t window) {
    using A = arithmetic<T>;
    const Sizes<A> n(q.shape, k.shape);
    const AttentionMask visible(q, k, first_seen, ends, causal, window);
    static thread_local Scratch shared;
    const int64_t heads = n.B * n.NKV * n.keys;
    A* keys = shared.reserve<A>(heads * (2 * n.width + n.HD));
    A *values = keys + heads * n.width, *keys_transposed = values + heads * n.width;
#pragma omp parallel
    {
        pack_heads(k, n, keys, keys_transposed);
        pack_heads(v, n, values, static_cast<A*>(nullptr));
        static thread_local Scratch own;
        A* scores = own.reserve<A>(tile_queries * (n.scores_row + 2 * n.width));
        A *queries = scores + tile_queries * n.scores_row, *rows = queries + tile_queries * n.width;
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t tile_index = n.tiles - 1; tile_index >= 0; tile_index--)  // the longest first
            for (int64_t bh = 0; bh < n.B * n.NH; bh++) {
                const int64_t b = bh / n.NH, h = bh % n.NH, head = b * n.NKV + h / n.group;
                const QueryTile<A> tile(visible, b, tile_index * tile_queries);
                const int64_t first = tile.first, count = tile.count;
                copy_rows(q, b, h, first, tile_queries, n.width, queries);
                visible_scores(n, tile, queries, keys_transposed + head * n.keys * n.HD, scores);
                A sum[tile_queries];
                for (int64_t i = 0; i < count; i++) {
                    A largest;
                    std::tie(largest, sum[i]) = softmax_row(tile, i, scores + i * n.scores_row, A(scale));
                    lse(b, h, first + i) = largest + std::log(sum[i]);
                }
                visible_product(n, tile, scores, values + head * n.keys * n.width, rows);
                for (int64_t i = 0; i < count; i++) {
                    T* to = &out(b, first + i, h, 0);
                    for (int64_t d = 0; d < n.HD; d++) to[d] = T(rows[i * n.width + d] / sum[i]);
                }
            }
    }
}

// dk and dv of a head are sums over all its queries: the (query head, tile) pairs are dealt to `parts`
// owners, each with its own sums. Their number depends on the shape alone, so the bits do not depend on the
// threads.
template <class T>
void attention_backward_cpu(View<T, 4> dq, View<T, 4> dk, View<T, 4> dv, View<const T, 4> dout,
                            View<const T, 4>, View<const arithmetic<T>, 3> lse, View<const T, 4> q,
                            View<const T, 4> k, View<const T, 4> v, View<const int32_t, 2> first_seen,
                            View<const int32_t, 2> ends, double scale, bool causal, int64_t window) {
    using A = arithmetic<T>;
    constexpr int64_t wanted_owners = 8;  // 16: 10% slower at T = 2048, the sums leave L2
    const Sizes<A> n(q.shape, k.shape);
    const AttentionMask visible(q, k, first_seen, ends, causal, window);
    const int64_t heads = n.B * n.NKV, pairs = n.group * n.tiles;
    const int64_t parts = std::min(pairs, (wanted_owners + heads - 1) / heads);
    const int64_t part_stride = n.keys * n.width;
    static thread_local Scratch shared;
    A* keys = shared.reserve<A>(heads * n.keys * (2 * n.width + 2 * n.HD) + 2 * heads * parts * part_stride);
    A *values = keys + heads * part_stride, *keys_transposed = values + heads * part_stride;
    A* values_transposed = keys_transposed + heads * n.keys * n.HD;
    A *dkeys = values_transposed + heads * n.keys * n.HD, *dvalues = dkeys + heads * parts * part_stride;
#pragma omp parallel
    {
        pack_heads(k, n, keys, keys_transposed);
        pack_heads(v, n, values, values_transposed);
        static thread_local Scratch own;
        A* scratch = own.reserve<A>(tile_queries * (2 * n.scores_row + 3 * n.width));
#pragma omp for schedule(dynamic)
        for (int64_t owner = 0; owner < heads * parts; owner++) {
            const int64_t head = owner / parts, b = head / n.NKV, g = head % n.NKV;
            A *dkeys_own = dkeys + owner * part_stride, *dvalues_own = dvalues + owner * part_stride;
            std::fill(dkeys_own, dkeys_own + part_stride, A(0));
            std::fill(dvalues_own, dvalues_own + part_stride, A(0));
            for (int64_t pair = owner % parts; pair < pairs; pair += parts)
                backward_tile(n, b, g * n.group + pair % n.group,
                              QueryTile<A>(visible, b, pair / n.group * tile_queries), dq, dout, lse, q,
                              A(scale), keys + head * part_stride, keys_transposed + head * n.keys * n.HD,
                              values_transposed + head * n.keys * n.HD, dkeys_own, dvalues_own, scratch);
        }
        sum_parts(n, parts, part_stride, dkeys, dk);
        sum_parts(n, parts, part_stride, dvalues, dv);
    }
}

}  // namespace

Variant cpu_attention_forward() {
    return {"cpu", "query tiles, packed keys, whole rows of scores",
            instantiations<LLAMAC_FLOATS(attention_forward_cpu), attention_forward_cpu<double>>()};
}
Variant cpu_attention_backward() {
    return {"cpu", "query tiles, p from lse, dk and dv summed by owners",
            instantiations<LLAMAC_FLOATS(attention_backward_cpu), attention_backward_cpu<double>>()};
}

}  // namespace llamac
