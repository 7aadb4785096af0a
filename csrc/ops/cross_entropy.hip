// Cross-entropy of a softmax over the vocabulary, fused with its gradient.
//
//   losses[n]    = log(sum_v e^logits[n,v]) - logits[n,targets[n]]
//   dlogits[n,v] = dloss * (e^logits[n,v] / sum - [v = targets[n]])
//
// Rows whose target is ignore_index have loss 0 and gradient 0. dlogits may be logits' memory, so that the
// largest activation of the model exists once; null: losses only. e^ is taken of logits - max, which cannot
// overflow.
//
// reference: plain loops. The sum is double whatever the storage: a serial float sum over a vocabulary of
//            128,256 loses more than PyTorch's, which adds in vector lanes.
// cpu:       rows over threads; a row (16 KB at V = 4,096 in f32) stays in cache for its passes: maximum,
//            sum, gradient.
#include <algorithm>
#include <cmath>

#include "core/registry.h"
#include "core/simd.h"

namespace llamac {
namespace {

template <class T>
void cross_entropy_reference(View<arithmetic<T>, 1> losses, View<T, 2> dlogits, View<const T, 2> logits,
                             View<const int32_t, 1> targets, double dloss, int64_t ignore_index) {
    using A = arithmetic<T>;
    const int64_t N = logits.shape[0], V = logits.shape[1];
    for (int64_t n = 0; n < N; n++) {
        const int64_t target = targets(n);
        if (target == ignore_index) {
            losses(n) = 0;
            for (int64_t v = 0; dlogits && v < V; v++) dlogits(n, v) = T(0);
            continue;
        }
        A largest = A(logits(n, 0));
        for (int64_t v = 1; v < V; v++) largest = std::max(largest, A(logits(n, v)));
        double sum = 0;
        for (int64_t v = 0; v < V; v++) sum += std::exp(A(logits(n, v)) - largest);
        losses(n) = A(std::log(sum) + double(largest) - double(logits(n, target)));
        for (int64_t v = 0; dlogits && v < V; v++) {
            const A probability = std::exp(A(logits(n, v)) - largest) / A(sum);
            dlogits(n, v) = T(A(dloss) * (probability - (v == target ? A(1) : A(0))));
        }
    }
}

// One row; dx may be x, or null.
template <class T>
float cross_entropy_row(T* dx, const T* x, int64_t target, int64_t V, float dloss) {
    float largest = float(x[0]);
#pragma omp simd reduction(max : largest)
    for (int64_t v = 0; v < V; v++) largest = std::max(largest, float(x[v]));
    const double sum = block_sum(V, [=](int64_t v) { return fast_exp(float(x[v]) - largest); });
    const float at_target = float(x[target]);
    if (dx) {
        const float scale = static_cast<float>(dloss / sum);
#pragma omp simd
        for (int64_t v = 0; v < V; v++) store(dx + v, fast_exp(float(x[v]) - largest) * scale);
        dx[target] = T(dloss * (static_cast<float>(fast_exp(at_target - largest) / sum) - 1.0f));
    }
    return static_cast<float>(std::log(sum) + double(largest) - double(at_target));
}

template <class T>
void cross_entropy_cpu(View<float, 1> losses, View<T, 2> dlogits, View<const T, 2> logits,
                       View<const int32_t, 1> targets, double dloss, int64_t ignore_index) {
    const int64_t N = logits.shape[0], V = logits.shape[1];
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        T* dx = dlogits ? &dlogits(n, 0) : nullptr;
        if (targets(n) == ignore_index) {
            losses(n) = 0;
            if (dx) std::fill(dx, dx + V, T(0));
        } else {
            losses(n) = cross_entropy_row(dx, &logits(n, 0), targets(n), V, static_cast<float>(dloss));
        }
    }
}

Operation cross_entropy(
    "cross_entropy(losses: A[N], dlogits?: T[N,V]; logits: T[N,V], targets: i32[N] <V;"
    " dloss: float, ignore_index: int)",
    "losses = logsumexp(logits) - logits[target], and the gradient of logits",
    {{"cpu", "rows over threads, three passes over a cached row", Where::host,
      entries<cross_entropy_cpu<float>, cross_entropy_cpu<bf16>>()},
     {"reference", "plain loops", Where::host,
      entries<cross_entropy_reference<float>, cross_entropy_reference<bf16>,
              cross_entropy_reference<double>>()}},
    [](const Call& c) { return 6.0 * c["N"] * c["V"]; });

}  // namespace
}  // namespace llamac
