// Checks of memory for calls from outside C++ (llamac.run and torch.ops), in addition to those of run(). Typed calls
// do not pay for them.
#pragma once
#include <cstdint>
#include <span>

#include "core/operation.h"

namespace llamac {

// Throws Error for an address that is not aligned; for an output that overlaps itself or another operand, other than exactly an
// input that it may_share; for a marker of ignored rows beyond 32 bits; and for an index out of bounds. memory: where the
// operands are; indices in device memory are not read. wide: bit i: operand i is the lower halves of int64s, whose values are
// checked. fresh: bit i: output i was allocated for this call and overlaps nothing.
void check_memory(const Operation& op, std::span<const Tensor> tensors, std::span<const Scalar> scalars,
                  Backend memory, uint32_t wide = 0, uint32_t fresh = 0);

// The part of it that scalars alone decide.
void check_scalars(const Operation& op, std::span<const Scalar> scalars);

}  // namespace llamac
