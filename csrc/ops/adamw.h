// When a guarded step of AdamW is skipped: decided on the device, and told by the host in the log.
#pragma once
#include <limits>

#include "platform/hip.h"

namespace llamac {

// The square of the largest float: above, and where it is NaN, a norm is not finite.
constexpr double largest_square =
    double(std::numeric_limits<float>::max()) * double(std::numeric_limits<float>::max());

// squares: of the gradients; *guard: of the losses; without a guard no step is skipped.
__host__ __device__ inline bool is_skipped(double squares, const double* guard) {
    return guard && !(squares + *guard <= largest_square);
}

}  // namespace llamac
