// Written twice on purpose: llamac/training/schedule.py has the same rule; tests/model/test_agreement.py::test_learning_rate.
//
// The learning rate of each step: linear warm-up, then one of four shapes.
#pragma once
#include <cstdint>

#include "run/options.h"

namespace llamac {

// The learning rate of step `step`, 1 .. --steps.
double learning_rate(const Options& options, int64_t step);

}  // namespace llamac
