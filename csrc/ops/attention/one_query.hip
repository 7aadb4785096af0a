// Attention of one query per head on the host: variant `one_query` of attention.hip. Keys and values are read where they lie.
#include "ops/attention/one_query.h"

#include "ops/attention/attention.h"

namespace llamac {
namespace {

template <class T>
void attention_forward_one_query(View<T, 4> out, View<arithmetic<T>, 3> lse, View<const T, 4> q,
                                 View<const T, 4> k, View<const T, 4> v, View<const int32_t, 2> first,
                                 View<const int32_t, 2> ends, double scale, bool causal, int64_t window) {
    using A = arithmetic<T>;
    const int64_t B = q.shape[0], NH = q.shape[2], HD = q.shape[3], group = NH / k.shape[2];
    const AttentionMask visible(q, k, first, ends, causal, window);
#pragma omp parallel for collapse(2) schedule(static) if (NH * k.shape[1] * B * HD >= one_query::least_shared)
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < NH; h++) {
            const int64_t begin = visible.begin(b, 0), end = visible.end(b, 0);
            const one_query::Seen<T> seen{&k(b, begin, h / group, 0),
                                          &v(b, begin, h / group, 0),
                                          k.stride[1],
                                          v.stride[1],
                                          end - begin,
                                          HD};
            A* scratch = one_query::scratch_of<A>(k.shape[1], HD);
            lse(b, h, 0) = one_query::attend(&out(b, 0, h, 0), &q(b, 0, h, 0), seen, A(scale), scratch);
        }
}

}  // namespace

Variant one_query_attention_forward() {
    return {"one_query", "one query per head, keys and values as they lie",
            instantiations<LLAMAC_FLOATS(attention_forward_one_query), attention_forward_one_query<double>>(),
            Constraints{"T = 1", [](const Call& call) { return call["T"] == 1; }}};
}

}  // namespace llamac
