// The products of a linear, out = x · weightᵀ (+ residual), and of its backward: in the storage type, or of codes of fp8.
#pragma once
#include "model/fp8.h"

namespace llamac {

// out = x · weightᵀ (+ residual) (+ bias). x [N,in], quantized where its products are in fp8, as dout below; weight [out,in]; out
// and residual [N,out]; bias [out].
void linear_forward(Model& model, const Tensor& out, const Quantizable& x, const Quantizable& weight,
                    const Tensor& residual = {}, const Tensor& bias = {});
// dx (+)= dout · weight
void linear_backward_input(Model& model, const Tensor& dx, const Quantizable& dout, const Quantizable& weight,
                           bool accumulate = false);
// dweight (+)= doutᵀ · x
void linear_backward_weight(Model& model, const Tensor& dweight, const Quantizable& dout,
                            const Quantizable& x, bool accumulate);

}  // namespace llamac
