// Storage types. One table has the properties of each type; no other code lists or tests types. To add a type, add a
// C++ type that converts to and from float, an enumerator and a row, and name it in the descriptions of operations
// that support it. llamac/base/dtypes.py holds the names for Python on purpose; tests/ops/test_dtypes.py compares the two,
// and the names with numpy, safetensors and torch.
#pragma once
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/fp8.h"
#include "platform/dlpack.h"
#include "platform/error.h"
#include "platform/hip.h"

namespace llamac {

// bfloat16: the upper half of a float; rounds to nearest, ties to even; NaN stays NaN.
struct bf16 {
    static constexpr int mantissa = 7;
    uint16_t bits;

    bf16() = default;
    __host__ __device__ explicit bf16(float value) {
        union {
            float f;
            uint32_t u;
        } v{value};
        const uint32_t rounded = (v.u + 0x7fffu + (v.u >> 16 & 1u)) >> 16;
        const bool is_nan = (v.u & 0x7fffffffu) > 0x7f800000u;
        bits = static_cast<uint16_t>(is_nan ? (v.u >> 16 | 0x40u) : rounded);
    }
    __host__ __device__ operator float() const {
        union {
            uint32_t u;
            float f;
        } v{static_cast<uint32_t>(bits) << 16};
        return v.f;
    }
};
static_assert(sizeof(bf16) == 2);

// IEEE binary16; rounds to nearest, ties to even, beyond the largest number to infinity; NaN stays NaN.
struct fp16 {
    static constexpr int mantissa = 10;
    uint16_t bits;

    fp16() = default;
    __host__ __device__ explicit fp16(float value) : bits(fp16_bits(value)) {}
    __host__ __device__ operator float() const { return fp16_value(bits); }
};

enum class DType : uint8_t { f32, bf16, f64, i32, fp16, e4m3, e5m2, e4m3fnuz, e5m2fnuz };

// Types of operands of products, with a scale; of tensors of all operations.
enum class Use : uint8_t { products, tensors };

struct DTypeInfo {
    const char* name;   // in descriptions, flags and messages
    int mantissa_bits;  // those that are stored; 0: an integer
    Use use;
    const char* safetensors;  // in a file's header
    const char* python;       // of torch, of numpy (bfloat16: of its extension ml_dtypes) and of config.json
    dlpack::DataType dlpack;  // by which other libraries' arrays, torch's among them, are recognized
    int library;              // the number that both vendors' libraries have for it
    int collectives;          // the number that NCCL and RCCL have for it; -1: not exchanged
    int64_t bytes = 0;
    DType arithmetic = {};  // the type of computation
    float largest = 0;      // of types of products, which saturate

    constexpr bool is_integer() const { return mantissa_bits == 0; }
};

// T: the C++ type. Arithmetic: fp32 for types that are no wider; f64 makes a reference the oracle of the tests.
template <DType type, class T, DType arithmetic_type>
struct DTypeRow {
    using Storage = T;
    static constexpr DType dtype = type, arithmetic = arithmetic_type;
    DTypeInfo info;
};

inline constexpr std::tuple dtype_rows{
    DTypeRow<DType::f32, float, DType::f32>{
        {"f32", 23, Use::tensors, "F32", "float32", {dlpack::floating, 32, 1}, 0, 7}},
    DTypeRow<DType::bf16, bf16, DType::f32>{
        {"bf16", 7, Use::tensors, "BF16", "bfloat16", {dlpack::bfloat, 16, 1}, 14, 9}},
    DTypeRow<DType::f64, double, DType::f64>{
        {"f64", 52, Use::tensors, "F64", "float64", {dlpack::floating, 64, 1}, 1, 8}},
    DTypeRow<DType::i32, int32_t, DType::f32>{
        {"i32", 0, Use::tensors, "I32", "int32", {dlpack::integer, 32, 1}, 10, 2}},
    DTypeRow<DType::fp16, fp16, DType::f32>{
        {"fp16", 10, Use::tensors, "F16", "float16", {dlpack::floating, 16, 1}, 2, 6}},
    DTypeRow<DType::e4m3, e4m3, DType::f32>{
        {"e4m3", 3, Use::products, "F8_E4M3", "float8_e4m3fn", {dlpack::e4m3fn, 8, 1}, 28, -1}},
    DTypeRow<DType::e5m2, e5m2, DType::f32>{
        {"e5m2", 2, Use::products, "F8_E5M2", "float8_e5m2", {dlpack::e5m2, 8, 1}, 29, -1}},
    DTypeRow<DType::e4m3fnuz, e4m3fnuz, DType::f32>{
        {"e4m3fnuz", 3, Use::products, "F8_E4M3FNUZ", "float8_e4m3fnuz", {dlpack::e4m3fnuz, 8, 1}, 1000, -1}},
    DTypeRow<DType::e5m2fnuz, e5m2fnuz, DType::f32>{
        {"e5m2fnuz", 2, Use::products, "F8_E5M2FNUZ", "float8_e5m2fnuz", {dlpack::e5m2fnuz, 8, 1}, 1001, -1}},
};

// ---- rows by enumerator and by C++ type

constexpr size_t dtype_count = std::tuple_size_v<decltype(dtype_rows)>;
template <size_t... i>
constexpr std::array<DTypeInfo, dtype_count> make_dtype_table(std::index_sequence<i...>) {
    const auto complete = [](const auto& row) {
        DTypeInfo info = row.info;
        info.bytes = sizeof(typename std::decay_t<decltype(row)>::Storage);
        info.arithmetic = row.arithmetic;
        if constexpr (requires { std::decay_t<decltype(row)>::Storage::largest; })
            info.largest = std::decay_t<decltype(row)>::Storage::largest;
        return info;
    };
    return {complete(std::get<i>(dtype_rows))...};
}
inline constexpr auto dtype_table = make_dtype_table(std::make_index_sequence<dtype_count>());

constexpr const DTypeInfo& info(DType t) {
    return dtype_table[static_cast<size_t>(t)];
}
constexpr const char* name(DType t) {
    return info(t).name;
}
constexpr int64_t size_of(DType t) {
    return info(t).bytes;
}
// Whether values are rounded from the type of the arithmetic as they are stored.
constexpr bool is_narrow(DType t) {
    return !info(t).is_integer() && info(t).arithmetic != t;
}

template <size_t i>
using DTypeRowAt = std::tuple_element_t<i, decltype(dtype_rows)>;
template <class T, size_t i = 0>
constexpr DType dtype_of() {
    static_assert(DTypeRowAt<i>::dtype == static_cast<DType>(i), "rows stand in the enumerators' order");
    if constexpr (std::is_same_v<T, typename DTypeRowAt<i>::Storage>)
        return DTypeRowAt<i>::dtype;
    else
        return dtype_of<T, i + 1>();
}
// The type of arithmetic on values of T.
template <class T>
using arithmetic = typename DTypeRowAt<static_cast<size_t>(info(dtype_of<T>()).arithmetic)>::Storage;
template <class T>
constexpr bool narrow = is_narrow(dtype_of<T>());

// ---- dispatch: f.operator()<T>() with the C++ type of t

constexpr bool is_any(const DTypeInfo&) {
    return true;
}
// Codes of products mean nothing without their scale.
constexpr bool in_files(const DTypeInfo& d) {
    return d.use != Use::products;
}
constexpr bool is_tensor(const DTypeInfo& d) {
    return d.use == Use::tensors;
}
// The types of parameters and activations.
constexpr bool is_float(const DTypeInfo& d) {
    return is_tensor(d) && !d.is_integer();
}
// Over the types that operations have, or that `wanted` selects. Throws Error for another.
template <bool (*wanted)(const DTypeInfo&) = is_any, size_t i = 0, class F>
auto visit_dtype(DType t, const F& f) -> decltype(f.template operator()<float>()) {
    if constexpr (i == dtype_count) {
        fail("dtype number ", static_cast<int>(t), ": expected one that the operation has");
    } else {
        if constexpr (wanted(dtype_table[i]))
            if (t == static_cast<DType>(i)) return f.template operator()<typename DTypeRowAt<i>::Storage>();
        return visit_dtype<wanted, i + 1>(t, f);
    }
}

// x as storage of another type, to nearest; types narrower than f32 by way of f32.
template <class To, class From>
To to_storage(From x) {
    return To(static_cast<std::conditional_t<std::is_arithmetic_v<To>, To, float>>(x));
}
// n elements on the host; `from` need not be aligned.
void convert(const void* from, DType from_type, void* to, DType to_type, int64_t n);

// ---- names

using DTypeColumn = const char* DTypeInfo::*;
std::optional<DType> find_dtype(std::string_view text, DTypeColumn column = &DTypeInfo::name);
std::optional<DType> find_dtype(const dlpack::DataType& type);
// A floating-point type of operations, by its name; Error where there is none.
DType float_dtype(std::string_view name);
// "f32, bf16, f64 or fp16": those that `wanted` selects, for messages.
template <class Wanted>
std::string dtype_names(const Wanted& wanted, DTypeColumn column = &DTypeInfo::name) {
    std::string text, last;
    for (const DTypeInfo& d : dtype_table) {
        if (!wanted(d)) continue;
        if (!last.empty()) text += (text.empty() ? "" : ", ") + last;
        last = d.*column;
    }
    return text.empty() ? last : text + " or " + last;
}

}  // namespace llamac
