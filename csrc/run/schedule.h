// Written twice on purpose: llamac/training/schedule.py has the same rule; tests/model/test_agreement.py::test_learning_rate.
//
// The learning rate of each step: linear warm-up, then one of four shapes.
#pragma once
#include <cstdint>

namespace llamac {

// wsd: warm-up, stable, decay over the last fifth.
enum class ScheduleShape : uint8_t { cosine, linear, constant, wsd };

struct Schedule {
    ScheduleShape shape = ScheduleShape::cosine;
    double lr = 0;           // the peak
    double min_lr_frac = 0;  // the end, as a fraction of it
    int64_t warmup_steps = 0, steps = 0;
};

// The learning rate of step `step`, 1 .. steps.
double learning_rate(const Schedule& schedule, int64_t step);

}  // namespace llamac
