#include "run/schedule.h"

#include <algorithm>
#include <cmath>

#include "platform/error.h"

namespace llamac {

double learning_rate(const Options& s, int64_t step) {
    CHECK(step >= 1 && step <= s.steps);
    if (step <= s.warmup_steps) return s.lr * static_cast<double>(step) / static_cast<double>(s.warmup_steps);
    const double minimum = s.lr * s.min_lr_frac;
    const double progress = static_cast<double>(step - s.warmup_steps) /
                            static_cast<double>(std::max<int64_t>(1, s.steps - s.warmup_steps));
    if (s.schedule == ScheduleShape::cosine)
        return minimum + 0.5 * (1.0 + std::cos(M_PI * progress)) * (s.lr - minimum);
    if (s.schedule == ScheduleShape::linear) return s.lr + (minimum - s.lr) * progress;
    if (s.schedule == ScheduleShape::constant) return s.lr;
    // The last fifth, or the part of it after the warm-up.
    const int64_t begin = std::max(s.warmup_steps, s.steps - std::max<int64_t>(1, s.steps / 5));
    if (step <= begin) return s.lr;
    return s.lr + (minimum - s.lr) * static_cast<double>(step - begin) / static_cast<double>(s.steps - begin);
}

}  // namespace llamac
