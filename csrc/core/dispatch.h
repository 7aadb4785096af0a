// Calls an operation with operands: checks them, chooses the variant, and launches it.
#pragma once
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/operation.h"

namespace llamac {

// Variants that are to run instead of the default ones, by operation: the first of them that supports a call.
struct KernelChoices {
    KernelChoices() = default;
    // "rmsnorm_forward=naive", as --kernel takes it, or "rope_forward=shuffle,naive". The name `optimized` stands for
    // the default variants of the computing context, in their order. Throws Error for a name that does not exist.
    explicit KernelChoices(const std::vector<std::string>& choices);
    // Null: none for this operation.
    const std::vector<const Variant*>* of(const Operation& op) const;

  private:
    std::unordered_map<const Operation*, std::vector<const Variant*>> chosen;
};

// Checks shapes, types and strides, gives scalars that are left out their values, picks the variant (`variant`, else
// the context's choice, else the first that supports the call) and runs it, with `threads` per block where that is not
// 0. Throws Error with the operation, the operand, what was expected and what was found. Callers in C++ use
// ops/operations.h.
void run(const Operation& op, std::span<const Tensor> tensors, std::span<const Scalar> scalars,
         const Context& context = {}, const char* variant = nullptr, int threads = 0);

}  // namespace llamac
