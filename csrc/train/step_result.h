// What one optimizer step gives.
#pragma once
#include <cstdint>

namespace llamac {

struct StepResult {
    int64_t step = 0;      // from 1
    double loss = 0;       // nats per token: the mean over the step's tokens
    double grad_norm = 0;  // before clipping
    double lr = 0;
    // Since the end of the step before; since the start of this one where no step was in flight.
    double ms = 0;
    bool skipped = false;  // not finite, and --skip-nonfinite: weights and moments are as before
};

}  // namespace llamac
