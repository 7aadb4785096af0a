// The launchers of mean_loss, for cross_entropy, which may take the mean in the same call.
#pragma once
#include "core/operation.h"

namespace llamac {

// float and double.
template <class A>
void mean_loss_reference(View<A, 0> mean, View<A, 0> num_valid, View<const A, 1> losses,
                         View<const int32_t, 1> targets, int64_t ignore_index);
void mean_loss_cpu(View<float, 0> mean, View<float, 0> num_valid, View<const float, 1> losses,
                   View<const int32_t, 1> targets, int64_t ignore_index);
void mean_loss_naive(View<float, 0> mean, View<float, 0> num_valid, View<const float, 1> losses,
                     View<const int32_t, 1> targets, int64_t ignore_index, LaunchContext context);
void mean_loss_one_block(View<float, 0> mean, View<float, 0> num_valid, View<const float, 1> losses,
                         View<const int32_t, 1> targets, int64_t ignore_index, LaunchContext context);

}  // namespace llamac
