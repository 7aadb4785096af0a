// Whole tensors of a model that tensor parallelism divides, for its files: ranks exchange their parts, and those that write a tensor
// assemble it in host memory.
#pragma once
#include <functional>
#include <vector>

#include "model/model.h"

namespace llamac {

// Where a parameter is assembled.
struct Whole {
    const Parameter* parameter;
    void* to;
};
// All ranks of the tensor axis call these. The parameter of a weight, all of which each rank holds:
void collect_weight(Model& model, const Parameter& parameter, const Tensor& weight, void* to);
// All ranks call it. Parameters of a flat one, in a buffer of the optimizer's state:
void collect_state(Model& model, const Tensor& buffer, const FlatParam& flat,
                   const std::vector<Whole>& wholes);

}  // namespace llamac
