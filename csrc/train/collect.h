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
// Assembles a weight, whose part each rank of the tensor axis holds unsharded. All ranks of the axis call it. to: null on ranks
// that only send.
void collect_weight(Model& model, const Parameter& parameter, const Tensor& weight, void* to);
// Assembles parameters of a flat one from a buffer of the optimizer's state. All ranks call it.
void collect_state(Model& model, const Tensor& buffer, const FlatParam& flat,
                   const std::vector<Whole>& wholes);

}  // namespace llamac
