// Derivatives of torch.ops.llamac.*.
#pragma once
#include <torch/library.h>

#undef CHECK  // c10's; ours is core/error.h's
#include "torch_form.h"

namespace llamac {

// Gives the operation its derivative, or refuses one. All operations have to be defined.
void define_derivative(torch::Library& library, const Form& form);
// Of an operation in torch by its name: derivatives forward at once, others in the backward, where it gives results.
void refuse_derivative(torch::Library& library, const std::string& name);

}  // namespace llamac
