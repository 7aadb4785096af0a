// The table of storage types and what is made from it; test_dtypes.py compares its names with other libraries'.
#include <cmath>

#include "check.h"
#include "core/dtype.h"

using namespace llamac;

namespace dtypes_checks {
namespace {

TEST(check_rows) {
    static_assert(std::is_same_v<arithmetic<float>, float> && std::is_same_v<arithmetic<bf16>, float> &&
                  std::is_same_v<arithmetic<double>, double>);
    static_assert(narrow<bf16> && !narrow<float> && !narrow<double> && !narrow<int32_t>);
    for (size_t i = 0; i < dtype_count; i++) {
        const DType t = static_cast<DType>(i);
        const DTypeInfo& d = info(t);
        const std::string text = d.name;
        check(find_dtype(d.name) == t && find_dtype(d.safetensors, &DTypeInfo::safetensors) == t &&
                  find_dtype(d.python, &DTypeInfo::python) == t && find_dtype(d.dlpack) == t,
              text + ": each name finds it");
        check(d.bytes == d.dlpack.bits / 8 && d.dlpack.lanes == 1 && size_of(t) == d.bytes, text + ": bytes");
        check(info(d.arithmetic).arithmetic == d.arithmetic && info(d.arithmetic).bytes >= d.bytes &&
                  info(d.arithmetic).mantissa_bits >= d.mantissa_bits,
              text + ": the type of the arithmetic");
        check(visit_dtype<is_any>(
                  t, [&]<class T>() { return dtype_of<T>() == t && int64_t{sizeof(T)} == d.bytes; }),
              text + ": its C++ type");
    }
    check(is_narrow(DType::bf16) && is_narrow(DType::fp16) && !is_narrow(DType::f32) &&
          !is_narrow(DType::i32));
    check(!find_dtype("f8") && !find_dtype("F32") && !find_dtype(dlpack::DataType{dlpack::floating, 32, 2}));
    check(dtype_names(is_any) == "f32, bf16, f64, i32, fp16, e4m3, e5m2, e4m3fnuz or e5m2fnuz");
    check(dtype_names([](const DTypeInfo& d) { return d.is_integer(); }) == "i32", "one name");
    check(float_dtype("bf16") == DType::bf16, "by name");
    refused("an integer", {"dtype i32: expected f32, bf16, f64 or fp16"}, [] { float_dtype("i32"); });
}

// 1 and the next value, which differ by the last mantissa bit.
TEST(check_mantissas) {
    for (size_t i = 0; i < dtype_count; i++) {
        const DType t = static_cast<DType>(i);
        if (!is_float(info(t))) continue;
        const double step = std::ldexp(1.0, -info(t).mantissa_bits);
        visit_dtype<is_float>(t, [&]<class T>() {
            check(double(to_storage<T>(1 + step)) == 1 + step && double(to_storage<T>(1 + step / 4)) == 1,
                  std::string(name(t)) + ": mantissa bits");
        });
    }
}

TEST(check_conversions) {
    const double values[] = {0, 1, -2.5, 0.333, 1e30, -1e-30, INFINITY};
    constexpr int64_t n = std::size(values);
    for (size_t i = 0; i < dtype_count; i++)
        for (size_t k = 0; k < dtype_count; k++) {
            const DType from = static_cast<DType>(i), to = static_cast<DType>(k);
            if (!is_float(info(from)) || !is_float(info(to))) continue;
            alignas(8) char first[8 * n], second[8 * n], shifted[8 * n + 1];
            double expected[n], found[n];
            convert(values, DType::f64, first, from, n);
            std::memcpy(shifted + 1, first, sizeof first);
            convert(shifted + 1, from, expected, DType::f64, n);
            convert(shifted + 1, from, second, to, n);
            convert(second, to, found, DType::f64, n);
            bool right = true;
            for (int64_t v = 0; v < n; v++)
                right &= visit_dtype<is_float>(
                    to, [&]<class T>() { return found[v] == double(to_storage<T>(expected[v])); });
            check(right, std::string(name(from)) + " to " + name(to));
        }
    const uint16_t halves[] = {0x3c00, 0xc100, 0x0001, 0x7bff, 0xfc00, 0x7e00};  // IEEE binary16
    float found[std::size(halves)];
    convert(halves, DType::fp16, found, DType::f32, std::size(halves));
    check(found[0] == 1 && found[1] == -2.5f && found[2] == 0x1p-24f && found[3] == 65504 &&
          found[4] == -INFINITY && std::isnan(found[5]));
    // Ties to even, a carry into the exponent, the largest number and the first beyond it, subnormal numbers, NaN.
    const float rounded[][2] = {{1 + 0x1p-11f, 1}, {1 + 0x3p-11f, 1 + 0x1p-9f}, {0x1.ffep0f + 0x1p-11f, 2},
                                {65519, 65504},    {65520, INFINITY},           {-1e30f, -INFINITY},
                                {0x1p-25f, 0},     {0x1.8p-24f, 0x1p-23f},      {-0x1.ffcp-15f, -0x1p-14f}};
    for (const auto& [value, expected] : rounded)
        check(float(fp16(value)) == expected, "to the nearest fp16");
    check(std::isnan(float(fp16(NAN))));
    for (uint32_t bits = 0; bits < 0x7c00; bits++)
        if (fp16_bits(fp16_value(static_cast<uint16_t>(bits))) != bits) check(false, "fp16 and back");
}

}  // namespace
}  // namespace dtypes_checks
