// The calls in ops/operations.h: the types of their members, and how they run. A member without a default constructor cannot be
// omitted, and a scalar accepts only its own kind of number.
#pragma once
#include <algorithm>
#include <concepts>
#include <initializer_list>

#include "core/dispatch.h"
#include "core/registry.h"

namespace llamac {

// An operand that a call has to name; one that may be null is a Tensor with a default.
struct Required : Tensor {
    Required() = delete;
    Required(const Tensor& t) : Tensor(t) {}
};
struct Real : Scalar {
    Real() = delete;
    Real(double v) : Scalar(v) {}
};
struct Integer : Scalar {
    Integer() = delete;
    template <std::integral T>
    Integer(T v) : Scalar(static_cast<int64_t>(v)) {}
};
struct Flag : Scalar {
    Flag() = delete;
    template <std::same_as<bool> T>
    Flag(T v) : Scalar(v) {}
};

template <size_t size>
struct OperationName {
    char text[size];
    constexpr OperationName(const char (&name)[size]) { std::copy_n(name, size, text); }
};
// Looks the operation up once.
template <OperationName name>
void run_by_name(const Context& context, std::initializer_list<Tensor> tensors,
                 std::initializer_list<Scalar> scalars) {
    static const Operation& operation = find_operation(name.text);
    run(operation, {tensors.begin(), tensors.size()}, {scalars.begin(), scalars.size()}, context);
}

}  // namespace llamac
