// Written twice on purpose: llamac/training/schedule.py has the same rule; tests/test_agreement.py::test_learning_rate.
//
// The learning rate of each step: linear warm-up, then one of four shapes.
#pragma once
#include <cstdint>
#include <string>

namespace llamac {

struct Schedule {
    std::string shape;       // cosine, linear, constant, wsd (warm-up, stable, decay over the last fifth)
    double lr = 0;           // the peak
    double min_lr_frac = 0;  // the end, as a fraction of it
    int64_t warmup_steps = 0, steps = 0;
};

// Of step `step`, 1 .. steps. Error for an unknown shape.
double learning_rate(const Schedule& schedule, int64_t step);

}  // namespace llamac
