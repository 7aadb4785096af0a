#include "model/linear.h"

#include "model/model.h"
#include "ops/operations.h"

namespace llamac {
namespace {

struct Operand {
    Tensor codes, inverse;  // inverse: 1 / scale
};
Operand rows_of(const Model& m, const Quantizable& x) {
    return {x.rows, inverse_of(m, x, x.rows, false)};
}
Operand transposed_of(const Model& m, const Quantizable& x) {
    return {x.transposed, inverse_of(m, x, x.transposed, true)};
}
Operand weight_of(Model& m, const Quantizable& weight, bool transposed) {
    const Tensor codes = weight_codes(m, weight, transposed);
    return {codes, inverse_of(m, weight, codes, transposed)};
}

template <class Call>
void multiply(void (*operation)(const Context&, const Call&), Model& m, const Tensor& out, const Operand& a,
              const Operand& b, const Tensor& residual, bool accumulate, bool fast) {
    operation(m.context, {.out = out,
                          .a = a.codes,
                          .b = b.codes,
                          .a_scale = a.inverse,
                          .b_scale = b.inverse,
                          .residual = residual,
                          .accumulate = accumulate,
                          .fast_accum = int64_t{fast}});
}
// out (+)= a · bᵀ (+ residual). fast: the library may sum in fewer bits.
void multiply(Model& m, const Tensor& out, const Operand& a, const Operand& b, const Tensor& residual,
              bool accumulate, bool fast) {
    if (m.fp8->options.scaling == Fp8Scaling::row)
        return multiply(scaled_matmul_rows, m, out, a, b, residual, accumulate, fast);
    multiply(scaled_matmul, m, out, a, b, residual, accumulate, fast);
}

}  // namespace

void linear_forward(Model& m, const Tensor& out, const Quantizable& x, const Quantizable& weight,
                    const Tensor& residual, const Tensor& bias) {
    if (!x.in_fp8())
        return matmul_forward(
            m.context,
            {.out = out, .x = x.values, .weight = weight.values, .residual = residual, .bias = bias});
    multiply(m, out, rows_of(m, x), weight_of(m, weight, false), residual, false, true);
    if (bias.data) bias_forward(m.context, {.out = out, .x = out, .bias = bias});
}

void linear_backward_input(Model& m, const Tensor& dx, const Quantizable& dout, const Quantizable& weight,
                           bool accumulate) {
    if (!dout.in_fp8())
        return matmul_backward_input(
            m.context, {.dx = dx, .dout = dout.values, .weight = weight.values, .accumulate = accumulate});
    multiply(m, dx, rows_of(m, dout), weight_of(m, weight, true), {}, accumulate, false);
}

void linear_backward_weight(Model& m, const Tensor& dweight, const Quantizable& dout, const Quantizable& x,
                            bool accumulate) {
    if (!dout.in_fp8())
        return matmul_backward_weight(
            m.context, {.dweight = dweight, .dout = dout.values, .x = x.values, .accumulate = accumulate});
    multiply(m, dweight, transposed_of(m, dout), transposed_of(m, x), {}, accumulate, false);
}

}  // namespace llamac
