// Written twice on purpose: llamac/base/tolerance.py has the same rule; tests/ops/test_tolerance.py::test_both_languages.
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
// Of a normal number.
constexpr int smallest_exponent(DType dtype) {
    return dtype == DType::fp16 ? -14 : -126;
}

struct Deviation {
    double relative_l2 = 0, largest = 0;  // absolute where the norm of the truth is 0
};

// The distance between neighboring numbers of the type at x; at 0 that of the denormals.
inline double ulp(double x, DType dtype) {
    return std::ldexp(1.0, std::max(std::ilogb(x), smallest_exponent(dtype)) - info(dtype).mantissa_bits);
}

// The error of `count` elements, given by index. NaN is right if the truth is NaN (the mean of nothing); any other NaN or
// infinity is an infinite error.
template <class Found, class Truth>
Deviation error_of(size_t count, const Found& found, const Truth& truth) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    double norm = 0, squares = 0, largest = 0;
    // A product of a large batch has billions of elements.
#pragma omp parallel for reduction(+ : norm, squares) reduction(max : largest) if (count > size_t{1} << 20)
    for (size_t i = 0; i < count; i++) {
        const double x = found(i), right = truth(i);
        if (std::isnan(x) && std::isnan(right)) continue;
        const double difference = std::fabs(x - right);
        norm += right * right;
        squares += difference * difference;
        largest = std::max(largest, std::isfinite(difference) ? difference : infinity);
    }
    if (largest == infinity) return {infinity, infinity};
    return {std::sqrt(squares) / (norm > 0 ? std::sqrt(norm) : 1), largest};
}

inline Deviation error_of(const std::vector<double>& found, const std::vector<double>& truth) {
    return error_of(truth.size(), [&](size_t i) { return found[i]; }, [&](size_t i) { return truth[i]; });
}

// largest: of the truth's sizes.
inline Deviation floor_of(double largest, DType dtype) {
    if (largest == 0) return {};
    return {std::ldexp(floor_ulp, -info(dtype).mantissa_bits), floor_ulp * ulp(largest, dtype)};
}
inline Deviation floor_of(const std::vector<double>& truth, DType dtype) {
    double largest = 0;
    for (const double x : truth)
        if (!std::isnan(x)) largest = std::max(largest, std::fabs(x));
    return floor_of(largest, dtype);
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
