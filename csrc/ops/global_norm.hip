// The L2 norm of all gradients as one vector, for clipping (Pascanu et al., 2013): norm = sqrt(sum_p x[p]^2).
// Gradients of several types make several calls: accumulate continues with norm = sqrt(norm^2 + the sum).
//
// reference: one sum in double: a serial float sum over millions of terms would stall.
// cpu:       chunks of fixed size over threads, each summed by block_sum, then the chunks in order: the
//            number of threads does not show in the bits.
#include <algorithm>
#include <cmath>

#include "core/registry.h"
#include "core/simd.h"

namespace llamac {
namespace {

template <class T>
void global_norm_reference(View<arithmetic<T>, 1> norm, View<const T, 1> x, bool accumulate) {
    double sum = accumulate ? double(norm(0)) * double(norm(0)) : 0.0;
    for (int64_t p = 0; p < x.shape[0]; p++) sum += double(x(p)) * double(x(p));
    norm(0) = arithmetic<T>(std::sqrt(sum));
}

template <class T>
void global_norm_cpu(View<float, 1> norm, View<const T, 1> x, bool accumulate) {
    constexpr int64_t chunk = 16384;
    const int64_t P = x.shape[0], chunks = (P + chunk - 1) / chunk;
    std::vector<double> partial(chunks);
#pragma omp parallel for
    for (int64_t k = 0; k < chunks; k++) {
        const T* begin = x.data + k * chunk;
        partial[k] = block_sum(std::min(chunk, P - k * chunk),
                               [begin](int64_t i) { return float(begin[i]) * float(begin[i]); });
    }
    double sum = accumulate ? double(norm(0)) * double(norm(0)) : 0.0;
    for (const double s : partial) sum += s;
    norm(0) = static_cast<float>(std::sqrt(sum));
}

Operation global_norm(
    "global_norm(norm +=: A[1]; x: T[P]; accumulate: bool)", "norm = sqrt(sum of squares)",
    {{"cpu", "fixed chunks over threads", Where::host,
      entries<global_norm_cpu<float>, global_norm_cpu<bf16>>()},
     {"reference", "plain loops", Where::host,
      entries<global_norm_reference<float>, global_norm_reference<bf16>, global_norm_reference<double>>()}},
    [](const Call& c) { return 2.0 * c["P"]; });

}  // namespace
}  // namespace llamac
