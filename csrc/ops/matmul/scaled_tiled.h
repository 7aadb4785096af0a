// The variant `tiled` of scaled_matmul, as scaled.hip lists it.
#pragma once
#include "core/operation.h"

namespace llamac {

template <class T, class P, class Q>
void scaled_matmul_tiled(View<T, 2> out, View<const P, 2> a, View<const Q, 2> b, View<const float, 1> a_scale,
                         View<const float, 1> b_scale, View<const T, 2> residual, bool accumulate,
                         int64_t fast_accum, LaunchContext context);
bool scaled_tiled_supports(const Call& call);

}  // namespace llamac
