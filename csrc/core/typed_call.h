// The member types of the calls in ops/operations.h. A member without a default constructor cannot be omitted, and a
// scalar accepts only its own kind of number.
#pragma once
#include <concepts>

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

}  // namespace llamac
