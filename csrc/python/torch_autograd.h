// Derivatives of torch.ops.llamac.*.
#pragma once
#include <torch/library.h>

#undef CHECK  // c10's; ours is core/error.h's
#include "torch_form.h"

namespace llamac {

// Gives the operation its derivative, or one that says that there is none. All operations have to be defined.
void define_derivative(torch::Library& library, const Form& form);
// For a form that writes where it is told, of which autograd knows nothing: derivatives forward are refused.
void refuse_derivative(torch::Library& library, const Form& form);

}  // namespace llamac
