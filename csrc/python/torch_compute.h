// An operation on torch's tensors.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "torch_registry.h"

namespace llamac {

at::ScalarType torch_type(DType t);
// Nothing for a type that operations do not have.
std::optional<DType> find_dtype(at::ScalarType type);

// From now on compute() refuses tensors of a GPU with this reason, if there is one: torch.cmake's LLAMAC_WITHOUT_GPU.
void refuse_gpus(std::string why);

// Runs it where its operands are (by the description, on one device; null: not defined), on a GPU on the current
// stream. An input is copied where the description does not take its strides. Shapes may have more dimensions, as
// torch_ops.cpp says.
// Throws ValueError, in one line, for what does not fit.
void compute(const Operation& op, std::vector<at::Tensor> operands, const std::vector<Scalar>& scalars);

// Throws as compute() does for types and scalars, which is all that tensors without memory show beside their shapes.
void check_types(const Operation& op, const std::vector<at::Tensor>& operands,
                 const std::vector<Scalar>& scalars);

}  // namespace llamac
