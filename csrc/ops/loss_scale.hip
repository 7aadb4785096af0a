// Dynamic loss scaling (Micikevicius et al., "Mixed Precision Training", 2018), for gradients of activations in fp16.
//
//   scale_loss         out = dloss * scale: the backward pass computes gradients that are `scale` times as large
//   update_loss_scale  after AdamW, by the sums that it has read (is_skipped of adamw.h): scale /= 2 if they skipped its
//                      step, scale *= 2 after `interval` other steps in a row, which are steps of AdamW
//
// counts: the steps since the scale changed, and the number of AdamW's next step, which is in its bias correction. interval 0:
// the scale is fixed. A scale is a power of two, so that gradients divided by it keep their bits; it never becomes infinite. A
// model has one, P = 1.
#include <cfloat>

#include "core/device.h"
#include "core/operation.h"
#include "ops/adamw.h"

namespace llamac {
namespace {

__host__ __device__ inline void update(float& scale, int32_t* counts, double squares, double guard,
                                       int64_t interval) {
    const bool skipped = is_skipped(squares, &guard);
    counts[0] = skipped ? 0 : counts[0] + 1;
    counts[1] += !skipped;
    if (interval == 0) return;
    if (skipped) scale *= 0.5f;
    if (counts[0] != interval) return;
    counts[0] = 0;
    if (scale <= FLT_MAX / 2) scale *= 2;
}

void scale_loss_reference(View<float, 1> out, View<const float, 1> dloss, View<const float, 1> scale) {
    for (int64_t p = 0; p < out.shape[0]; p++) out(p) = dloss(p) * scale(p);
}

void update_loss_scale_reference(View<float, 1> scale, View<int32_t, 2> counts, View<const double, 1> squares,
                                 View<const double, 1> guard, int64_t interval) {
    for (int64_t p = 0; p < scale.shape[0]; p++)
        update(scale(p), &counts(p, 0), squares(p), guard(p), interval);
}

// ---- naive

__global__ void scale_loss_naive_kernel(float* out, const float* dloss, const float* scale, int64_t P) {
    const int64_t p = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (p < P) out[p] = dloss[p] * scale[p];
}

void scale_loss_naive(View<float, 1> out, View<const float, 1> dloss, View<const float, 1> scale,
                      LaunchContext context) {
    const int64_t P = out.shape[0];
    launch(context.grid(P), scale_loss_naive_kernel, out.data, dloss.data, scale.data, P);
}

__global__ void update_loss_scale_naive_kernel(float* scale, int32_t* counts, const double* squares,
                                               const double* guard, int64_t interval, int64_t P) {
    const int64_t p = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (p < P) update(scale[p], counts + 2 * p, squares[p], guard[p], interval);
}

void update_loss_scale_naive(View<float, 1> scale, View<int32_t, 2> counts, View<const double, 1> squares,
                             View<const double, 1> guard, int64_t interval, LaunchContext context) {
    const int64_t P = scale.shape[0];
    launch(context.grid(P), update_loss_scale_naive_kernel, scale.data, counts.data, squares.data, guard.data,
           interval, P);
}

Operation scale_loss("scale_loss(out: f32[P]; dloss: f32[P], scale: f32[P] >0)", "out = dloss * scale",
                     {{"naive", "one thread per scale", instantiations<scale_loss_naive>()},
                      {"reference", "plain loops", instantiations<scale_loss_reference>()}});

Operation update_loss_scale(
    "update_loss_scale(scale~: f32[P] >0, counts~: i32[P,2] >0; squares: f64[P] >0, guard: f64[P] >0;"
    " interval: int >=0 {2000, 1, 0})",
    "the loss's scale and the number of AdamW's step after a step that may have been skipped",
    {{"naive", "one thread per scale", instantiations<update_loss_scale_naive>()},
     {"reference", "plain loops", instantiations<update_loss_scale_reference>()}});

}  // namespace
}  // namespace llamac
