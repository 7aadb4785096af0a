#include "core/product_check.h"

#include <algorithm>

#include "core/words.h"

namespace llamac {
namespace {

constexpr double factor = 3;     // of the tolerance
constexpr int64_t sampled = 64;  // rows, and columns, beside those of the largest element

template <class T>
double at(const std::vector<char>& values, int64_t i) {
    return to_storage<double>(reinterpret_cast<const T*>(values.data())[i]);
}
// Every step-th of the elements, from the first on.
std::vector<double> elements(const std::vector<char>& from, DType type, int64_t first, int64_t step,
                             int64_t count) {
    std::vector<double> to(static_cast<size_t>(count));
    visit_dtype(type, [&]<class T>() {
        for (int64_t i = 0; i < count; i++) to[i] = at<T>(from, first + i * step);
    });
    return to;
}

struct Largest {
    int64_t place = 0;
    double size = 0;
};
Largest largest_of(const std::vector<char>& values, DType type, int64_t count) {
    Largest found;
    visit_dtype(type, [&]<class T>() {
#pragma omp parallel
        {
            Largest own;
#pragma omp for schedule(static) nowait
            for (int64_t i = 0; i < count; i++)
                if (const double size = std::fabs(at<T>(values, i)); std::isfinite(size) && size > own.size)
                    own = {i, size};
#pragma omp critical
            if (own.size > found.size || (own.size == found.size && own.place < found.place)) found = own;
        }
    });
    return found;
}

std::vector<int64_t> sample(int64_t count, int64_t also) {
    std::vector<int64_t> places = {also};
    for (int64_t i = 0; i < std::min(count, sampled); i++)
        if (const int64_t place = i * count / std::min(count, sampled); place != also)
            places.push_back(place);
    return places;
}

double scale_at(const std::vector<float>& scales, int64_t i) {
    return scales.empty() ? 1 : static_cast<double>(scales[scales.size() == 1 ? 0 : static_cast<size_t>(i)]);
}

// The larger error of our own result and of sums in f32, where our own is finite.
Deviation error_on_sample(const Gemm& g, const ProductValues& v, const std::vector<int64_t>& rows,
                          const std::vector<int64_t>& columns) {
    const auto row_of = [&](const std::vector<char>& x, DType type, bool down, int64_t extent, int64_t i) {
        return down ? elements(x, type, i, extent, g.inner) : elements(x, type, i * g.inner, 1, g.inner);
    };
    std::vector<std::vector<double>> right;
    for (const int64_t j : columns) right.push_back(row_of(v.b, g.b, !g.b_transposed, g.columns, j));
    const size_t width = columns.size();
    std::vector<double> truth(rows.size() * width), own = truth, plain = truth;
#pragma omp parallel for
    for (size_t i = 0; i < rows.size(); i++) {
        const std::vector<double> left = row_of(v.a, g.a, g.a_transposed, g.rows, rows[i]);
        for (size_t j = 0; j < width; j++) {
            double sum = 0;
            float sum32 = 0;
            for (size_t k = 0; k < left.size(); k++) {
                sum += left[k] * right[j][k];
                sum32 += static_cast<float>(left[k]) * static_cast<float>(right[j][k]);
            }
            const double scale = scale_at(v.a_scale, rows[i]) * scale_at(v.b_scale, columns[j]);
            const int64_t place = rows[i] * g.columns + columns[j];
            const double added = (g.adds ? elements(v.c, g.c, place, 1, 1)[0] : 0) +
                                 (g.has_bias ? elements(v.bias, g.out, columns[j], 1, 1)[0] : 0);
            const double ours = elements(v.own, g.out, place, 1, 1)[0];
            if (!std::isfinite(ours)) continue;
            truth[i * width + j] = sum * scale + added;
            plain[i * width + j] = static_cast<double>(sum32) * scale + added;
            own[i * width + j] = ours;
        }
    }
    const Deviation of_own = error_of(own, truth), of_plain = error_of(plain, truth);
    return {std::max(of_own.relative_l2, of_plain.relative_l2), std::max(of_own.largest, of_plain.largest)};
}

}  // namespace

ProductCheck::ProductCheck(const Gemm& gemm_, ProductValues values_)
    : gemm(gemm_), values(std::move(values_)) {
    const int64_t count = gemm.rows * gemm.columns;
    const Largest largest = largest_of(values.own, gemm.out, count);
    const std::vector<int64_t> rows = sample(gemm.rows, largest.place / gemm.columns),
                               columns = sample(gemm.columns, largest.place % gemm.columns);
    const Deviation error = error_on_sample(gemm, values, rows, columns);
    const auto tail = [](double n) { return std::sqrt(std::log(std::max(n, 3.0))); };
    const double beyond =
        tail(static_cast<double>(count)) / tail(static_cast<double>(rows.size() * columns.size()));
    // Sums of fast products keep fewer bits than f32 has, and more than bf16. Hopper's matrix units sum products of fp8 in about
    // 14 bits, more than fp16 has, even if they are not asked to be fast: such sums are off by 1.5e-4 of the norm on an H100.
    const DType sums = gemm.fast_accumulation ? DType::bf16 : size_of(gemm.a) == 1 ? DType::fp16 : gemm.out;
    const bool coarser = info(sums).mantissa_bits < info(gemm.out).mantissa_bits;
    const Deviation floor = floor_of(largest.size, coarser ? sums : gemm.out);
    allowed = {std::max((factor + 1) * error.relative_l2, 2 * floor.relative_l2),
               std::max((factor + 1) * error.largest * beyond, 2 * floor.largest)};
}

std::string ProductCheck::difference(const std::vector<char>& result) const {
    Deviation found;
    visit_dtype(gemm.out, [&]<class T>() {
        // If our own result is not finite, neither are the operands or the sums: there is nothing to compare.
        const auto is_number = [&](size_t i) {
            return std::isfinite(at<T>(values.own, static_cast<int64_t>(i)));
        };
        const auto of = [&](const std::vector<char>& x) {
            return [&](size_t i) { return is_number(i) ? at<T>(x, static_cast<int64_t>(i)) : 0; };
        };
        found = error_of(static_cast<size_t>(gemm.rows * gemm.columns), of(result), of(values.own));
    });
    if (within(found, allowed)) return "";
    if (!std::isfinite(found.largest)) return "it has NaN or infinity where our own kernel has numbers";
    return formatted(
        "it differs from our own kernel's by %.2g of the norm and at most %.2g, allowed are %.2g and %.2g",
        found.relative_l2, found.largest, allowed.relative_l2, allowed.largest);
}

}  // namespace llamac
