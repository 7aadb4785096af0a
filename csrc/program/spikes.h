// A spike is a loss or gradient norm above median + 8 spreads of its last 64 finite values, once there are 32. The spread is 1.4826
// times their median absolute deviation (the standard deviation of a normal distribution), and at least 1% of the median. A few
// outliers hardly change either, and a value that stays high is normal after 32 steps.
#pragma once
#include <deque>
#include <vector>

namespace llamac {

struct Spike {
    const char* quantity;             // as the field of a step's event: "loss", "grad_norm"
    double found, expected, allowed;  // allowed: the limit
};

class SpikeDetector {
  public:
    // Both numbers must be finite.
    std::vector<Spike> add(double loss, double grad_norm);

  private:
    std::deque<double> losses, grad_norms;  // of the last steps
};

}  // namespace llamac
