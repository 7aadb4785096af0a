#include "program/spikes.h"

#include <algorithm>
#include <cmath>

namespace llamac {
namespace {

constexpr size_t window = 64, fewest = 32;
constexpr double deviation = 1.4826, least_spread = 0.01, factor = 8;

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const size_t half = values.size() / 2;
    return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

void add_value(std::vector<Spike>& spikes, const char* quantity, std::deque<double>& values, double value) {
    if (values.size() >= fewest) {
        std::vector<double> last(values.begin(), values.end());
        const double expected = median(last);
        for (double& x : last) x = std::abs(x - expected);
        const double spread = std::max(deviation * median(last), least_spread * std::abs(expected));
        const double allowed = expected + factor * spread;
        if (value > allowed) spikes.push_back({quantity, value, expected, allowed});
    }
    values.push_back(value);
    if (values.size() > window) values.pop_front();
}

}  // namespace

std::vector<Spike> SpikeDetector::add(double loss, double grad_norm) {
    std::vector<Spike> spikes;
    add_value(spikes, "loss", losses, loss);
    add_value(spikes, "grad_norm", grad_norms, grad_norm);
    return spikes;
}

}  // namespace llamac
