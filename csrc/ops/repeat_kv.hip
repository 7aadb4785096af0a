// Grouped-query attention (Ainslie et al., "GQA", 2023) for an attention that wants a key/value head a query
// head: query head h reads key/value head h / (NH/NKV).
//
//   out[b,t,h,:] = x[b,t,h/(NH/NKV),:]
//   dx[b,t,k,:]  = sum of dout[b,t,h,:] over the NH/NKV heads h of group k
//
// Only the naive attention uses it; the others read the shared head in place.
#include "core/registry.h"

namespace llamac {
namespace {

template <class T>
void repeat_kv_forward_reference(View<T, 4> out, View<const T, 4> x) {
    const int64_t B = out.shape[0], time = out.shape[1], NH = out.shape[2], HD = out.shape[3];
    const int64_t group = NH / x.shape[2];
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < B; b++)
        for (int64_t t = 0; t < time; t++)
            for (int64_t h = 0; h < NH; h++)
                for (int64_t i = 0; i < HD; i++) out(b, t, h, i) = x(b, t, h / group, i);
}

template <class T>
void repeat_kv_backward_reference(View<T, 4> dx, View<const T, 4> dout) {
    using A = arithmetic<T>;
    const int64_t B = dx.shape[0], time = dx.shape[1], NKV = dx.shape[2], HD = dx.shape[3];
    const int64_t group = dout.shape[2] / NKV;
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < B; b++)
        for (int64_t t = 0; t < time; t++)
            for (int64_t k = 0; k < NKV; k++)
                for (int64_t i = 0; i < HD; i++) {
                    A sum = 0;
                    for (int64_t h = k * group; h < (k + 1) * group; h++) sum += A(dout(b, t, h, i));
                    dx(b, t, k, i) = T(sum);
                }
}

bool heads_divide(const Call& c) {
    return c["NH"] % c["NKV"] == 0;
}

Operation repeat_kv_forward("repeat_kv_forward(out: T[B,T,NH,HD]; x: T[B,T,NKV,HD] strided)",
                            "every key/value head NH/NKV times",
                            {{"reference", "plain loops", Where::host,
                              entries<repeat_kv_forward_reference<float>, repeat_kv_forward_reference<bf16>,
                                      repeat_kv_forward_reference<double>>(),
                              heads_divide}});

Operation repeat_kv_backward(
    "repeat_kv_backward(dx: T[B,T,NKV,HD] strided; dout: T[B,T,NH,HD])",
    "the gradients of a group's heads, added",
    {{"reference", "plain loops", Where::host,
      entries<repeat_kv_backward_reference<float>, repeat_kv_backward_reference<bf16>,
              repeat_kv_backward_reference<double>>(),
      heads_divide}},
    [](const Call& c) { return 1.0 * c["B"] * c["T"] * c["NH"] * c["HD"]; });

}  // namespace
}  // namespace llamac
