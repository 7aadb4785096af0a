// Calls an operation with operands: checks them, chooses the variant, and launches it.
#pragma once
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/operation.h"

namespace llamac {

// Variants that replace the defaults, by operation: the first that supports a call runs.
struct KernelChoices {
    KernelChoices() = default;
    // "rmsnorm_forward=naive", as --kernel takes it, or "rope_forward=shuffle,naive". The name `optimized` means
    // the default variants of the computing context. Throws Error for an unknown name.
    explicit KernelChoices(const std::vector<std::string>& choices);
    // Null: none for this operation.
    const std::vector<const Variant*>* of(const Operation& op) const;

  private:
    std::unordered_map<const Operation*, std::vector<const Variant*>> chosen;
};

// The variant that a call tries first where this build computes; null: there is none. Needs no device.
const Variant* first_choice(const Operation& op);
// Whether the variant computes where the call's operands are and supports it.
bool takes(const Variant& variant, const Call& call);

// Checks shapes, types and strides, fills in omitted scalars, picks the variant (`variant`, else the context's choice, else
// the first that supports the call) and runs it, with `threads` per block unless that is 0. Throws Error with operation,
// operand, expected and found. C++ calls ops/operations.h instead.
void run(const Operation& op, std::span<const Tensor> tensors, std::span<const Scalar> scalars,
         const Context& context = {}, const char* variant = nullptr, int threads = 0);

}  // namespace llamac
