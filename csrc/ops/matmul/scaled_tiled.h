// The variant `tiled` of scaled_matmul, as scaled.hip lists it, and how a sum is scaled.
#pragma once
#include <cfloat>

#include "core/operation.h"

namespace llamac {

// sum * a * b of two positive scales. Their product can leave the normal numbers where the result does not. Multiplied
// one by one, powers of two that are both small or both large lose nothing that the result keeps.
__host__ __device__ inline float scaled(float sum, float a, float b) {
    const float both = a * b;
    return both >= FLT_MIN && both <= FLT_MAX ? sum * both : sum * a * b;
}

template <class T, class P, class Q>
void scaled_matmul_tiled(View<T, 2> out, View<const P, 2> a, View<const Q, 2> b, View<const float, 1> a_scale,
                         View<const float, 1> b_scale, View<const T, 2> residual, bool accumulate,
                         int64_t fast_accum, LaunchContext context);
bool scaled_tiled_supports(const Call& call);

}  // namespace llamac
