// The result of one optimizer step.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace llamac {

// Values of a tensor beyond the largest of its fp8 type, in an optimizer step on all ranks.
struct Saturated {
    std::string tensor;  // slot_name() of model/fp8.h
    int64_t values = 0, of = 0;
};

struct StepResult {
    int64_t step = 0;      // from 1
    double loss = 0;       // nats per token: the mean over the step's tokens
    double grad_norm = 0;  // before clipping
    double lr = 0;
    // Since the end of the step before, or the start of this one if none was in flight.
    double ms = 0;
    bool skipped = false;   // not finite, and --skip-nonfinite or a scale: weights and moments are as before
    double loss_scale = 0;  // with --dtype fp16, of the step's gradients
    std::vector<Saturated> saturated = {};  // of tensors with any
};

// Seconds of the parts of a start.
struct StartTimes {
    double ranks = 0;       // until they are connected
    double weights = 0;     // to draw or load them, with the rest of a checkpoint
    double tuning = 0;      // of matrix products, in the first step
    double graphs = 0;      // to capture them, in the first two or three steps
    double first_step = 0;  // tuning included
    double total = 0;       // from the start of the program to the end of the first step
};

}  // namespace llamac
