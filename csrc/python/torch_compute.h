// An operation on torch's tensors.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <string>

#include "torch_form.h"

namespace llamac {

at::ScalarType torch_type(DType t);
// Nothing for a type that operations do not have.
std::optional<DType> find_dtype(at::ScalarType type);

// Without symbols, PyTorch's dispatcher is left out: it would add half as many instructions again on the host.
at::Tensor allocate(at::IntArrayRef shape, at::ScalarType type, c10::Device device);
at::Tensor allocate(c10::SymIntArrayRef shape, at::ScalarType type, c10::Device device);

// From now on compute() refuses tensors of a GPU with this reason, if there is one: torch.cmake's LLAMAC_WITHOUT_GPU.
void refuse_gpus(std::string why);

// Runs it where its operands are (by the description, on one device; null: not defined), on a GPU on the current
// stream. An input whose strides the description does not take is replaced by a copy. Shapes may have more dimensions, as
// torch_ops.cpp says. fresh: bit i is set where output i was allocated for this call.
// Throws ValueError, in one line, for bad arguments.
void compute(const Operation& op, std::span<at::Tensor> operands, std::span<const Scalar> scalars,
             uint32_t fresh = 0);

// Throws as compute() does for types and scalars, which is all that tensors without memory show beside their shapes.
void check_types(const Operation& op, std::span<const at::Tensor> operands, std::span<const Scalar> scalars);

}  // namespace llamac
