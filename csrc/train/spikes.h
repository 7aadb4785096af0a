// Written twice on purpose: llamac/spikes.py has the same; tests/test_agreement.py::test_spikes.
//
// A spike is a loss or a gradient norm far above what the steps before it had. Expected is the median of the last 64
// finite values, and the spread is 1.4826 times their median absolute deviation, which is a normal distribution's
// standard deviation, but at least 1% of the median. A value is a spike above median + 8 spreads, once there are 32
// values. Median and deviation hardly move for a few outliers. A value that stays high is normal after 32 steps.
#pragma once
#include <deque>
#include <vector>

namespace llamac {

struct Spike {
    const char* quantity;             // as the field of a step's event: "loss", "grad_norm"
    double found, expected, allowed;  // allowed: the most that would have been none
};

class SpikeDetector {
  public:
    // Of a step whose numbers are finite.
    std::vector<Spike> add(double loss, double grad_norm);

  private:
    std::deque<double> losses, grad_norms;  // of the last steps
};

}  // namespace llamac
