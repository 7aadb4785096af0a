// Embedding: a row of the table for every token.
//
//   out[n,c]        = weight[tokens[n],c]
//   dweight[v,c] (+)= sum over the n with tokens[n] = v of dout[n,c]
//
// Backward adds the rows of equal tokens first, in their order and in fp32, and rounds each sum once:
// deterministic without atomics, and a bf16 gradient loses nothing to a token that is frequent.
//
// reference: plain loops; backward holds a whole table of sums.
// cpu:       backward sorts the tokens by counting, then the threads share out the vocabulary.
#include <algorithm>
#include <cstring>

#include "core/registry.h"
#include "core/simd.h"

namespace llamac {
namespace {

template <class T>
void embedding_forward_reference(View<T, 2> out, View<const int32_t, 1> tokens, View<const T, 2> weight) {
    const int64_t N = out.shape[0], C = out.shape[1];
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) out(n, c) = weight(tokens(n), c);
}

template <class T, class G>
void embedding_backward_reference(View<G, 2> dweight, View<const T, 2> dout, View<const int32_t, 1> tokens,
                                  bool accumulate) {
    using A = arithmetic<T>;
    const int64_t N = dout.shape[0], C = dout.shape[1], V = dweight.shape[0];
    std::vector<A> sum(V * C, A(0));
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) sum[tokens(n) * C + c] += A(dout(n, c));
    for (int64_t v = 0; v < V; v++)
        for (int64_t c = 0; c < C; c++)
            dweight(v, c) = G((accumulate ? A(dweight(v, c)) : A(0)) + sum[v * C + c]);
}

template <class T>
void embedding_forward_cpu(View<T, 2> out, View<const int32_t, 1> tokens, View<const T, 2> weight) {
    const int64_t N = out.shape[0], C = out.shape[1];
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) std::memcpy(&out(n, 0), &weight(tokens(n), 0), C * sizeof(T));
}

// The rows of dout in the order of their tokens: those of token v stand at first[v] .. first[v+1]-1.
struct RowsByToken {
    std::vector<int64_t> first, row;
};
RowsByToken sort_by_token(View<const int32_t, 1> tokens, int64_t V) {
    const int64_t N = tokens.shape[0];
    RowsByToken sorted{std::vector<int64_t>(V + 1, 0), std::vector<int64_t>(N)};
    for (int64_t n = 0; n < N; n++) sorted.first[tokens(n) + 1]++;
    for (int64_t v = 0; v < V; v++) sorted.first[v + 1] += sorted.first[v];
    std::vector<int64_t> next = sorted.first;
    for (int64_t n = 0; n < N; n++) sorted.row[next[tokens(n)]++] = n;
    return sorted;
}

template <class T, class G>
void embedding_backward_cpu(View<G, 2> dweight, View<const T, 2> dout, View<const int32_t, 1> tokens,
                            bool accumulate) {
    const int64_t C = dout.shape[1], V = dweight.shape[0];
    const RowsByToken sorted = sort_by_token(tokens, V);
#pragma omp parallel
    {
        std::vector<float> sum(C);
        float* s = sum.data();
        // A frequent token makes its row dear: small pieces, handed out as threads get free.
#pragma omp for schedule(dynamic, 16)
        for (int64_t v = 0; v < V; v++) {
            G* dw = &dweight(v, 0);
            if (sorted.first[v] == sorted.first[v + 1]) {
                if (!accumulate) std::fill(dw, dw + C, G(0));
                continue;
            }
            std::fill(s, s + C, 0.0f);
            for (int64_t i = sorted.first[v]; i < sorted.first[v + 1]; i++) {
                const T* d = &dout(sorted.row[i], 0);
#pragma omp simd
                for (int64_t c = 0; c < C; c++) s[c] += float(d[c]);
            }
#pragma omp simd
            for (int64_t c = 0; c < C; c++) store(dw + c, (accumulate ? float(dw[c]) : 0.0f) + s[c]);
        }
    }
}

// Of the table, only the rows that are read.
double embedding_forward_bytes(const Call& c) {
    return static_cast<double>(2 * c.operand("out").bytes() + c.operand("tokens").bytes());
}

Operation embedding_forward("embedding_forward(out: T[N,C]; tokens: i32[N] <V, weight: T[V,C])",
                            "out = weight[tokens]",
                            {{"cpu", "rows over threads", Where::host,
                              entries<embedding_forward_cpu<float>, embedding_forward_cpu<bf16>>()},
                             {"reference", "plain loops", Where::host,
                              entries<embedding_forward_reference<float>, embedding_forward_reference<bf16>,
                                      embedding_forward_reference<double>>()}},
                            nullptr, embedding_forward_bytes);

Operation embedding_backward(
    "embedding_backward(dweight +=: G[V,C]; dout: T[N,C], tokens: i32[N] <V; accumulate: bool)",
    "dweight[tokens] += dout, the rows of a token added before they are rounded",
    {{"cpu", "tokens sorted, vocabulary over threads", Where::host,
      entries<embedding_backward_cpu<float, float>, embedding_backward_cpu<bf16, bf16>,
              embedding_backward_cpu<bf16, float>>()},
     {"reference", "plain loops", Where::host,
      entries<embedding_backward_reference<float, float>, embedding_backward_reference<bf16, bf16>,
              embedding_backward_reference<bf16, float>, embedding_backward_reference<double, double>>()}},
    [](const Call& c) { return 1.0 * c["N"] * c["C"]; });

}  // namespace
}  // namespace llamac
