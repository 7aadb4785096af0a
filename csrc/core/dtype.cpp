#include "core/dtype.h"

namespace llamac {

void convert(const void* from, DType from_type, void* to, DType to_type, int64_t n) {
    const char* source = static_cast<const char*>(from);
    visit_dtype<is_any>(from_type, [&]<class From>() {
        visit_dtype(to_type, [&]<class To>() {
            To* out = static_cast<To*>(to);
#pragma omp parallel for if (n > (1 << 16))  // fewer take less time than waking the threads
            for (int64_t i = 0; i < n; i++) {
                From value;
                std::memcpy(&value, source + i * static_cast<int64_t>(sizeof(From)), sizeof(From));
                out[i] = to_storage<To>(value);
            }
        });
    });
}

std::optional<DType> find_dtype(std::string_view text, DTypeColumn column) {
    for (size_t t = 0; t < dtype_count; t++)
        if (text == dtype_table[t].*column) return static_cast<DType>(t);
    return std::nullopt;
}

std::optional<DType> find_dtype(const dlpack::DataType& type) {
    for (size_t t = 0; t < dtype_count; t++)
        if (type == dtype_table[t].dlpack) return static_cast<DType>(t);
    return std::nullopt;
}

DType float_dtype(std::string_view text) {
    const std::optional<DType> found = find_dtype(text);
    if (!found || !is_float(info(*found))) fail("dtype ", text, ": expected ", dtype_names(is_float));
    return *found;
}

}  // namespace llamac
