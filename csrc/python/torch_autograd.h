// Derivatives of torch.ops.llamac.*.
#pragma once
#include <torch/library.h>

#include "torch_form.h"

namespace llamac {

// Gives the operation its derivative, or refuses one. All operations have to be defined.
void define_derivative(torch::Library& library, const Form& form);
// Of an operation in torch by its name: forward ones at once; others in the backward, or, for a form that writes where
// it is told, at once, too.
void refuse_derivative(torch::Library& library, const std::string& name);

}  // namespace llamac
