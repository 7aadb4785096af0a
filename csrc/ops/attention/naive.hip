// Attention by its formulas, a kernel per step: variant `naive` of attention.hip. The scores exist as a whole, so memory grows
// with T S. The workspace: scores f32[B,NH,T,S]; in the backward pass p in their place, and ds f32[B,NH,T,S].
#include <algorithm>
#include <cmath>

#include "core/device.h"
#include "ops/attention/attention.h"

namespace llamac {
namespace {

int64_t padded(int64_t bytes) {
    return (bytes + 255) / 256 * 256;
}
int64_t scores_bytes(const Call& c) {
    return padded(c["B"] * c["NH"] * c["T"] * c["S"] * 4);
}

// The scores at the workspace's start, or those behind them.
template <class T>
View<float, 4> scores_of(View<const T, 4> q, View<const T, 4> k, const LaunchContext& context,
                         int64_t which) {
    const int64_t B = q.shape[0], time = q.shape[1], NH = q.shape[2], S = k.shape[1];
    char* const at = static_cast<char*>(context.workspace) + which * padded(B * NH * time * S * 4);
    return {reinterpret_cast<float*>(at), {B, NH, time, S}, {NH * time * S, time * S, S, 1}};
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

// The key/value head that query head h reads.
template <class T>
__device__ int64_t group_of(int64_t h, const View<float, 4>& scores, const View<const T, 4>& k) {
    return h / (scores.shape[1] / k.shape[2]);
}

__device__ bool sees(const AttentionMask& visible, int64_t b, int64_t t, int64_t s) {
    return s >= visible.begin(b, t) && s < visible.end(b, t);
}

// scores[b,h,t,s] = scale * sum_d q[b,t,h,d] * k[b,s,g,d] for the keys s that t sees, g being the head that h reads.
template <class T>
__global__ void attention_forward_naive_kernel_scores(View<float, 4> scores, View<const T, 4> q,
                                                      View<const T, 4> k, float scale,
                                                      AttentionMask visible) {
    const Index at = element_of(scores);
    const int64_t b = at.i[0], h = at.i[1], t = at.i[2], s = at.i[3];
    if (!at.inside || !sees(visible, b, t, s)) return;
    const int64_t g = group_of(h, scores, k);
    double sum = 0;
    for (int64_t d = 0; d < q.shape[3]; d++) sum += double(float(q(b, t, h, d)) * float(k(b, s, g, d)));
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

// out[b,t,h,d] = sum_s p[b,h,t,s] * v[b,s,g,d].
template <class T>
__global__ void attention_forward_naive_kernel(View<T, 4> out, View<float, 4> p, View<const T, 4> v,
                                               AttentionMask visible) {
    const Index at = element_of(out);
    const int64_t b = at.i[0], t = at.i[1], h = at.i[2], d = at.i[3];
    if (!at.inside) return;
    const int64_t g = group_of(h, p, v);
    double sum = 0;
    for (int64_t s = visible.begin(b, t); s < visible.end(b, t); s++)
        sum += double(p(b, h, t, s) * float(v(b, s, g, d)));
    out(b, t, h, d) = T(static_cast<float>(sum));
}

// p and ds of one pair of query and key.
template <class T>
__global__ void attention_backward_naive_kernel_scores(View<float, 4> p, View<float, 4> ds,
                                                       View<const T, 4> dout, View<const T, 4> out,
                                                       View<const float, 3> lse, View<const T, 4> q,
                                                       View<const T, 4> k, View<const T, 4> v, float scale,
                                                       AttentionMask visible) {
    const Index at = element_of(p);
    const int64_t b = at.i[0], h = at.i[1], t = at.i[2], s = at.i[3];
    if (!at.inside || !sees(visible, b, t, s)) return;
    const int64_t g = group_of(h, p, k);
    double score = 0, dp = 0, delta = 0;
    for (int64_t d = 0; d < q.shape[3]; d++) {
        const float gradient = float(dout(b, t, h, d));
        score += double(float(q(b, t, h, d)) * float(k(b, s, g, d)));
        dp += double(gradient * float(v(b, s, g, d)));
        delta += double(gradient * float(out(b, t, h, d)));
    }
    const float probability = expf(scale * static_cast<float>(score) - lse(b, h, t));
    p(b, h, t, s) = probability;
    ds(b, h, t, s) = scale * probability * static_cast<float>(dp - delta);
}

template <class T>
__global__ void attention_backward_naive_kernel_queries(View<T, 4> dq, View<float, 4> ds, View<const T, 4> k,
                                                        AttentionMask visible) {
    const Index at = element_of(dq);
    const int64_t b = at.i[0], t = at.i[1], h = at.i[2], d = at.i[3];
    if (!at.inside) return;
    const int64_t g = group_of(h, ds, k);
    double sum = 0;
    for (int64_t s = visible.begin(b, t); s < visible.end(b, t); s++)
        sum += double(ds(b, h, t, s) * float(k(b, s, g, d)));
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

template <class T>
void attention_forward_naive(View<T, 4> out, View<float, 3> lse, View<const T, 4> q, View<const T, 4> k,
                             View<const T, 4> v, View<const int32_t, 2> first, View<const int32_t, 2> ends,
                             double scale, bool causal, int64_t window, LaunchContext context) {
    const View<float, 4> scores = scores_of(q, k, context, 0);
    const AttentionMask visible(q, k, first, ends, causal, window);
    launch(grid_over(scores, context), attention_forward_naive_kernel_scores<T>, scores, q, k, scale,
           visible);
    launch(context.grid(q.shape[0] * q.shape[1] * q.shape[2]), attention_forward_naive_kernel_softmax, lse,
           scores, visible);
    launch(grid_over(out, context), attention_forward_naive_kernel<T>, out, scores, v, visible);
}

template <class T>
void attention_backward_naive(View<T, 4> dq, View<T, 4> dk, View<T, 4> dv, View<const T, 4> dout,
                              View<const T, 4> out, View<const float, 3> lse, View<const T, 4> q,
                              View<const T, 4> k, View<const T, 4> v, View<const int32_t, 2> first,
                              View<const int32_t, 2> ends, double scale, bool causal, int64_t window,
                              LaunchContext context) {
    const View<float, 4> p = scores_of(q, k, context, 0), ds = scores_of(q, k, context, 1);
    const AttentionMask visible(q, k, first, ends, causal, window);
    launch(grid_over(p, context), attention_backward_naive_kernel_scores<T>, p, ds, dout, out, lse, q, k, v,
           scale, visible);
    launch(grid_over(dq, context), attention_backward_naive_kernel_queries<T>, dq, ds, k, visible);
    launch(grid_over(dk, context), attention_backward_naive_kernel<T>, dk, dv, p, ds, dout, q, visible);
}

}  // namespace

Variant naive_attention_forward() {
    return {"naive",
            "a kernel per formula, whole scores in memory",
            instantiations<LLAMAC_FLOATS(attention_forward_naive)>(),
            nullptr,
            blocks_of(256),
            scores_bytes};
}
Variant naive_attention_backward() {
    return {"naive",
            "a kernel per formula, whole p and ds in memory",
            instantiations<LLAMAC_FLOATS(attention_backward_naive)>(),
            nullptr,
            blocks_of(256),
            [](const Call& c) { return 2 * scores_bytes(c); }};
}

}  // namespace llamac
