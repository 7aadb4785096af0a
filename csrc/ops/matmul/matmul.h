// The variants of matmul that have files of their own, and those of scaled_matmul.
#pragma once
#include <cfloat>

#include "core/operation.h"

namespace llamac {

// One variant of the three products; one without instantiations is left out.
struct MatmulVariants {
    Variant forward, backward_input, backward_weight;
};
inline MatmulVariants matmul_variants(const Variant& all, std::span<const Instantiation> forward,
                                      std::span<const Instantiation> backward_input,
                                      std::span<const Instantiation> backward_weight) {
    MatmulVariants of{all, all, all};
    of.forward.instantiations = forward;
    of.backward_input.instantiations = backward_input;
    of.backward_weight.instantiations = backward_weight;
    return of;
}
MatmulVariants cpu_matmul();          // cpu.hip
MatmulVariants naive_matmul();        // naive.hip
MatmulVariants tiled_matmul();        // tiled.hip
MatmulVariants library_matmul();      // library.hip
Variant few_rows_matmul_forward();    // cpu.hip
Variant vectorized_matmul_forward();  // vectorized.hip

// scaled_tiled.hip: of scaled_matmul and of scaled_matmul_rows.
Variant tiled_scaled_matmul();
// A launcher for each pair of types of a, which may hold gradients, and b.
// NOLINTNEXTLINE(bugprone-macro-parentheses)
#define LLAMAC_PAIRS_OF(LAUNCHER, T, E4, E5) LAUNCHER<T, E4, E4>, LAUNCHER<T, E5, E4>
#define LLAMAC_PAIRS(LAUNCHER, T) \
    LLAMAC_PAIRS_OF(LAUNCHER, T, e4m3, e5m2), LLAMAC_PAIRS_OF(LAUNCHER, T, e4m3fnuz, e5m2fnuz)
// sum * a * b of two positive scales. Their product can leave the normal numbers where the result does not. Multiplied
// one by one, powers of two that are both small or both large lose nothing that the result keeps.
__host__ __device__ inline float scaled(float sum, float a, float b) {
    const float both = a * b;
    return both >= FLT_MIN && both <= FLT_MAX ? sum * both : sum * a * b;
}

}  // namespace llamac
