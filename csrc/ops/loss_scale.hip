// Dynamic loss scaling (Micikevicius et al., "Mixed Precision Training", 2018), for gradients of activations in fp16.
//
//   scale_loss         out = dloss * scale: the backward pass computes gradients that are `scale` times as large
//   update_loss_scale  after AdamW, by the sums that it has read (is_skipped of adamw.h): scale /= 2 if they skipped its
//                      step, scale *= 2 after `interval` other steps in a row, which are steps of AdamW
//
// counts: the steps since the scale changed, and the number of AdamW's next step, which is in its bias correction. interval 0:
// the scale is fixed. A scale is a power of two, so that gradients divided by it keep their bits. It stays below 2^127, where
// doubling would make it infinite. Everything is one number: naive is all that there is to do.
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
    if (counts[0] < interval) return;
    counts[0] = 0;
    if (scale < 0x1p126f) scale *= 2;
}

void scale_loss_reference(View<float, 1> out, View<const float, 1> dloss, View<const float, 1> scale) {
    out(0) = dloss(0) * scale(0);
}

void update_loss_scale_reference(View<float, 1> scale, View<int32_t, 1> counts, View<const double, 1> squares,
                                 View<const double, 1> guard, int64_t interval) {
    update(scale(0), counts.data, squares(0), guard(0), interval);
}

// ---- naive

__global__ void scale_loss_naive_kernel(float* out, const float* dloss, const float* scale) {
    if (threadIdx.x == 0) *out = *dloss * *scale;
}

void scale_loss_naive(View<float, 1> out, View<const float, 1> dloss, View<const float, 1> scale,
                      LaunchContext context) {
    launch(context.grid(1), scale_loss_naive_kernel, out.data, dloss.data, scale.data);
}

__global__ void update_loss_scale_naive_kernel(float* scale, int32_t* counts, const double* squares,
                                               const double* guard, int64_t interval) {
    if (threadIdx.x == 0) update(*scale, counts, *squares, *guard, interval);
}

void update_loss_scale_naive(View<float, 1> scale, View<int32_t, 1> counts, View<const double, 1> squares,
                             View<const double, 1> guard, int64_t interval, LaunchContext context) {
    launch(context.grid(1), update_loss_scale_naive_kernel, scale.data, counts.data, squares.data, guard.data,
           interval);
}

Operation scale_loss("scale_loss(out: f32[1]; dloss: f32[1], scale: f32[1] >0)", "out = dloss * scale",
                     {{"naive", "one thread", instantiations<scale_loss_naive>(), nullptr, blocks_of(64)},
                      {"reference", "one number", instantiations<scale_loss_reference>()}});

Operation update_loss_scale(
    "update_loss_scale(scale~: f32[1] >0, counts~: i32[2] >0; squares: f64[1] >0, guard: f64[1] >0;"
    " interval: int >=0 {2000, 1, 0})",
    "the loss's scale and the number of AdamW's step after a step that may have been skipped",
    {{"naive", "one thread", instantiations<update_loss_scale_naive>(), nullptr, blocks_of(64)},
     {"reference", "one number", instantiations<update_loss_scale_reference>()}});

}  // namespace
}  // namespace llamac
