// Written twice on purpose: llamac/tolerance.py has the same rule; tests/test_tolerance.py::test_both_languages.
//
// How far a result may be from float64's: at most a factor of a baseline's error, by L2 norm and by largest element. Never
// required is less than two units in the last place: of the largest value for an element, of every value for the norm.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/dtype.h"

namespace llamac {

constexpr double floor_ulp = 2;
constexpr int smallest_exponent = -126;  // of a normal number in f32 and bf16

struct Deviation {
    double relative_l2 = 0, largest = 0;  // absolute where the norm of the truth is 0
};

// The distance between neighbouring numbers of the type at x; at 0 that of the denormals.
inline double ulp(double x, DType dtype) {
    return std::ldexp(1.0, std::max(std::ilogb(x), smallest_exponent) - info(dtype).mantissa_bits);
}

// NaN is right where the truth is NaN (a mean of nothing); any other NaN or infinity is infinitely far.
inline Deviation error_of(const std::vector<double>& found, const std::vector<double>& truth) {
    double norm = 0;
    Deviation error;
    for (size_t i = 0; i < truth.size(); i++) {
        if (std::isnan(found[i]) && std::isnan(truth[i])) continue;
        const double difference = std::fabs(found[i] - truth[i]);
        if (!std::isfinite(difference))
            return {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()};
        norm += truth[i] * truth[i];
        error.relative_l2 += difference * difference;
        error.largest = std::max(error.largest, difference);
    }
    error.relative_l2 = std::sqrt(error.relative_l2);
    if (norm > 0) error.relative_l2 /= std::sqrt(norm);
    return error;
}

inline Deviation floor_of(const std::vector<double>& truth, DType dtype) {
    double largest = 0;
    for (const double x : truth)
        if (!std::isnan(x)) largest = std::max(largest, std::fabs(x));
    if (largest == 0) return {};
    return {std::ldexp(floor_ulp, -info(dtype).mantissa_bits), floor_ulp * ulp(largest, dtype)};
}

// The largest error that is accepted beside a baseline's.
inline Deviation allowed_of(const Deviation& baseline, const std::vector<double>& truth, DType dtype,
                            double factor) {
    const Deviation floor = floor_of(truth, dtype);
    return {std::max(factor * baseline.relative_l2, floor.relative_l2),
            std::max(factor * baseline.largest, floor.largest)};
}

// An infinite error is outside, whatever the baseline's.
inline bool within(const Deviation& error, const Deviation& allowed) {
    return std::isfinite(error.largest) && error.relative_l2 <= allowed.relative_l2 &&
           error.largest <= allowed.largest;
}

}  // namespace llamac
