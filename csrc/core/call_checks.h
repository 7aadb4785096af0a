// Checks of memory for calls from outside C++ (llamac.run and torch.ops), in addition to those of run(). Typed calls
// do not pay for them.
#pragma once
#include <cstdint>
#include <span>

#include "core/operation.h"

namespace llamac {

// Throws Error where an operand's address is not aligned; where an output overlaps itself or another operand, except
// where it has exactly the memory of an input that it may_share; where a scalar that marks rows is not of 32 bits; and
// where an index is out of bounds. What run() refuses is left to it. memory: where the operands are; indices in that of a
// device are not read. wide: bit i is set where operand i is the lower halves of int64s, whose upper halves count as
// well. fresh: bit i is set where the caller has allocated output i for this call; it overlaps nothing.
void check_memory(const Operation& op, std::span<const Tensor> tensors, std::span<const Scalar> scalars,
                  Backend memory, uint32_t wide = 0, uint32_t fresh = 0);

// The part of it that scalars alone decide.
void check_scalars(const Operation& op, std::span<const Scalar> scalars);

}  // namespace llamac
