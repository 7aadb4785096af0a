// Attention by its formulas, a kernel per step: variant `naive` of attention.hip. Keys and values are repeated for their query
// heads first (repeat_kv); the scores exist as a whole, so memory grows with T S.
//
// The workspace of forward: k and v repeated T[B,S,NH,HD], scores f32[B,NH,T,S]; of backward the same, with p in the scores'
// place, and ds f32[B,NH,T,S].
#include <algorithm>
#include <cmath>

#include "core/device.h"
#include "ops/attention/attention.h"
#include "ops/operations.h"

namespace llamac {
namespace {

// The workspace's parts.
template <class T>
struct Parts {
    View<T, 4> k, v;
    View<float, 4> scores, dscores;
};

int64_t padded(int64_t bytes) {
    return (bytes + 255) / 256 * 256;
}
int64_t heads_bytes(const Call& c) {
    return padded(c["B"] * c["S"] * c["NH"] * c["HD"] * size_of(c.operand("q").dtype));
}
int64_t scores_bytes(const Call& c) {
    return padded(c["B"] * c["NH"] * c["T"] * c["S"] * 4);
}

template <class T, int R>
View<T, R> contiguous(void* data, std::initializer_list<int64_t> shape) {
    const Tensor t = make_tensor(data, dtype_of<T>(), shape);
    View<T, R> v{static_cast<T*>(data), {}, {}};
    for (int d = 0; d < R; d++) v.shape[d] = t.shape[d], v.stride[d] = t.stride[d];
    return v;
}

template <class T>
Tensor tensor_of(View<T, 4> v) {
    using Element = std::remove_const_t<T>;
    Tensor t = make_tensor(const_cast<Element*>(v.data), dtype_of<Element>(),
                           {v.shape[0], v.shape[1], v.shape[2], v.shape[3]});
    for (int d = 0; d < 4; d++) t.stride[d] = v.stride[d];
    return t;
}

// Lays the parts out and repeats k and v.
template <class T>
Parts<T> prepare(View<const T, 4> q, View<const T, 4> k, View<const T, 4> v, const LaunchContext& context) {
    const int64_t B = q.shape[0], time = q.shape[1], NH = q.shape[2], HD = q.shape[3], S = k.shape[1];
    const int64_t heads = padded(B * S * NH * HD * int64_t{sizeof(T)}),
                  scores = padded(B * NH * time * S * 4);
    char* at = static_cast<char*>(context.workspace);
    const Parts<T> parts{contiguous<T, 4>(at, {B, S, NH, HD}), contiguous<T, 4>(at + heads, {B, S, NH, HD}),
                         contiguous<float, 4>(at + 2 * heads, {B, NH, time, S}),
                         contiguous<float, 4>(at + 2 * heads + scores, {B, NH, time, S})};
    repeat_kv_forward(context.caller, {.out = tensor_of(parts.k), .x = tensor_of(k)});
    repeat_kv_forward(context.caller, {.out = tensor_of(parts.v), .x = tensor_of(v)});
    return parts;
}

// The four indices of a thread's element.
struct Index {
    int64_t i[4];
    bool inside;
};
template <class T>
__device__ Index element_of(const View<T, 4>& v) {
    int64_t rest = (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
    Index index{};
    for (int d = 3; d >= 0; d--) {
        index.i[d] = rest % v.shape[d];
        rest /= v.shape[d];
    }
    index.inside = rest == 0;
    return index;
}

__device__ bool sees(const AttentionMask& visible, int64_t b, int64_t t, int64_t s) {
    return s >= visible.begin(b, t) && s < visible.end(b, t);
}

// scores[b,h,t,s] = scale * sum_d q[b,t,h,d] * k[b,s,h,d] for the keys s that t sees.
template <class T>
__global__ void attention_forward_naive_kernel_scores(View<float, 4> scores, View<const T, 4> q, View<T, 4> k,
                                                      float scale, AttentionMask visible) {
    const Index at = element_of(scores);
    const int64_t b = at.i[0], h = at.i[1], t = at.i[2], s = at.i[3];
    if (!at.inside || !sees(visible, b, t, s)) return;
    double sum = 0;
    for (int64_t d = 0; d < q.shape[3]; d++) sum += double(float(q(b, t, h, d)) * float(k(b, s, h, d)));
    scores(b, h, t, s) = scale * static_cast<float>(sum);
}

// A row of scores becomes probabilities, in place; a thread a row.
__global__ void attention_forward_naive_kernel_softmax(View<float, 3> lse, View<float, 4> scores,
                                                       AttentionMask visible) {
    const int64_t NH = scores.shape[1], time = scores.shape[2];
    const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (row >= scores.shape[0] * NH * time) return;
    const int64_t b = row / time / NH, h = row / time % NH, t = row % time;
    const int64_t begin = visible.begin(b, t), end = visible.end(b, t);
    float largest = scores(b, h, t, begin);
    for (int64_t s = begin + 1; s < end; s++) largest = fmaxf(largest, scores(b, h, t, s));
    double sum = 0;
    for (int64_t s = begin; s < end; s++) sum += double(expf(scores(b, h, t, s) - largest));
    for (int64_t s = begin; s < end; s++)
        scores(b, h, t, s) = static_cast<float>(double(expf(scores(b, h, t, s) - largest)) / sum);
    lse(b, h, t) = largest + static_cast<float>(log(sum));
}

// out[b,t,h,d] = sum_s p[b,h,t,s] * v[b,s,h,d].
template <class T>
__global__ void attention_forward_naive_kernel(View<T, 4> out, View<float, 4> p, View<T, 4> v,
                                               AttentionMask visible) {
    const Index at = element_of(out);
    const int64_t b = at.i[0], t = at.i[1], h = at.i[2], d = at.i[3];
    if (!at.inside) return;
    double sum = 0;
    for (int64_t s = visible.begin(b, t); s < visible.end(b, t); s++)
        sum += double(p(b, h, t, s) * float(v(b, s, h, d)));
    out(b, t, h, d) = T(static_cast<float>(sum));
}

// p and ds of one pair of query and key.
template <class T>
__global__ void attention_backward_naive_kernel_scores(View<float, 4> p, View<float, 4> ds,
                                                       View<const T, 4> dout, View<const T, 4> out,
                                                       View<const float, 3> lse, View<const T, 4> q,
                                                       View<T, 4> k, View<T, 4> v, float scale,
                                                       AttentionMask visible) {
    const Index at = element_of(p);
    const int64_t b = at.i[0], h = at.i[1], t = at.i[2], s = at.i[3];
    if (!at.inside || !sees(visible, b, t, s)) return;
    double score = 0, dp = 0, delta = 0;
    for (int64_t d = 0; d < q.shape[3]; d++) {
        const float gradient = float(dout(b, t, h, d));
        score += double(float(q(b, t, h, d)) * float(k(b, s, h, d)));
        dp += double(gradient * float(v(b, s, h, d)));
        delta += double(gradient * float(out(b, t, h, d)));
    }
    const float probability = expf(scale * static_cast<float>(score) - lse(b, h, t));
    p(b, h, t, s) = probability;
    ds(b, h, t, s) = scale * probability * static_cast<float>(dp - delta);
}

template <class T>
__global__ void attention_backward_naive_kernel_queries(View<T, 4> dq, View<float, 4> ds, View<T, 4> k,
                                                        AttentionMask visible) {
    const Index at = element_of(dq);
    const int64_t b = at.i[0], t = at.i[1], h = at.i[2], d = at.i[3];
    if (!at.inside) return;
    double sum = 0;
    for (int64_t s = visible.begin(b, t); s < visible.end(b, t); s++)
        sum += double(ds(b, h, t, s) * float(k(b, s, h, d)));
    dq(b, t, h, d) = T(static_cast<float>(sum));
}

// dk and dv: the query heads of a group are added before the sum is rounded.
template <class T>
__global__ void attention_backward_naive_kernel(View<T, 4> dk, View<T, 4> dv, View<float, 4> p,
                                                View<float, 4> ds, View<const T, 4> dout, View<const T, 4> q,
                                                AttentionMask visible) {
    const Index at = element_of(dk);
    const int64_t b = at.i[0], s = at.i[1], g = at.i[2], d = at.i[3];
    if (!at.inside) return;
    const int64_t time = q.shape[1], group = q.shape[2] / dk.shape[2];
    double key = 0, value = 0;
    for (int64_t h = g * group; h < (g + 1) * group; h++)
        for (int64_t t = 0; t < time; t++) {
            if (!sees(visible, b, t, s)) continue;
            key += double(ds(b, h, t, s) * float(q(b, t, h, d)));
            value += double(p(b, h, t, s) * float(dout(b, t, h, d)));
        }
    dk(b, s, g, d) = T(static_cast<float>(key));
    dv(b, s, g, d) = T(static_cast<float>(value));
}

// In two dimensions: AMD takes fewer than 2^32 threads in one, which scores exceed.
template <class T>
Grid grid_over(const View<T, 4>& v, const LaunchContext& context) {
    constexpr unsigned widest = 1 << 20;
    const int64_t elements = v.shape[0] * v.shape[1] * v.shape[2] * v.shape[3];
    const unsigned blocks = blocks_for(elements, context.threads), across = std::min(blocks, widest);
    return Grid(dim3(across, (blocks + across - 1) / across), context.threads, context.stream);
}

}  // namespace

int64_t attention_forward_naive_workspace(const Call& c) {
    return 2 * heads_bytes(c) + scores_bytes(c);
}
int64_t attention_backward_naive_workspace(const Call& c) {
    return 2 * heads_bytes(c) + 2 * scores_bytes(c);
}

template <class T>
void attention_forward_naive(View<T, 4> out, View<float, 3> lse, View<const T, 4> q, View<const T, 4> k,
                             View<const T, 4> v, View<const int32_t, 2> first, View<const int32_t, 2> ends,
                             double scale, bool causal, int64_t window, LaunchContext context) {
    const Parts<T> parts = prepare(q, k, v, context);
    const AttentionMask visible(q, k, first, ends, causal, window);
    const int64_t rows = q.shape[0] * q.shape[1] * q.shape[2];
    launch(grid_over(parts.scores, context), attention_forward_naive_kernel_scores<T>, parts.scores, q,
           parts.k, scale, visible);
    launch(context.grid(rows), attention_forward_naive_kernel_softmax, lse, parts.scores, visible);
    launch(grid_over(out, context), attention_forward_naive_kernel<T>, out, parts.scores, parts.v, visible);
}

template <class T>
void attention_backward_naive(View<T, 4> dq, View<T, 4> dk, View<T, 4> dv, View<const T, 4> dout,
                              View<const T, 4> out, View<const float, 3> lse, View<const T, 4> q,
                              View<const T, 4> k, View<const T, 4> v, View<const int32_t, 2> first,
                              View<const int32_t, 2> ends, double scale, bool causal, int64_t window,
                              LaunchContext context) {
    const Parts<T> parts = prepare(q, k, v, context);
    const AttentionMask visible(q, k, first, ends, causal, window);
    launch(grid_over(parts.scores, context), attention_backward_naive_kernel_scores<T>, parts.scores,
           parts.dscores, dout, out, lse, q, parts.k, parts.v, scale, visible);
    launch(grid_over(dq, context), attention_backward_naive_kernel_queries<T>, dq, parts.dscores, parts.k,
           visible);
    launch(grid_over(dk, context), attention_backward_naive_kernel<T>, dk, dv, parts.scores, parts.dscores,
           dout, q, visible);
}

template decltype(attention_forward_naive<float>) attention_forward_naive<float>;
template decltype(attention_forward_naive<bf16>) attention_forward_naive<bf16>;
template decltype(attention_forward_naive<fp16>) attention_forward_naive<fp16>;
template decltype(attention_backward_naive<float>) attention_backward_naive<float>;
template decltype(attention_backward_naive<bf16>) attention_backward_naive<bf16>;
template decltype(attention_backward_naive<fp16>) attention_backward_naive<fp16>;

}  // namespace llamac
