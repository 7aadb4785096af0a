// Matrix products by the vendor's library (core/gemm.h): variant "library" of matmul.hip. The residual, or the
// gradient that is there, is added by the product itself.
#include "core/gemm.h"
#include "ops/matmul/matmul.h"

namespace llamac {
namespace {

// The largest power of two that all addresses are multiples of; more than 256 gains nothing.
int alignment_of(std::initializer_list<const void*> operands) {
    uintptr_t bits = 256;
    for (const void* p : operands) bits |= reinterpret_cast<uintptr_t>(p);
    return static_cast<int>(bits & (~bits + 1));
}

// The operands are Views of a launch, or Tensors of a Call that asks whether it can be.
template <class Out, class X, class W, class R>
Gemm forward_product(DType type, const Out& out, const X& x, const W& weight, const R& residual) {
    const int alignment = alignment_of({out.data, x.data, weight.data, residual.data});
    return {x.shape[0], weight.shape[0],          x.shape[1], false, true, type,
            type,       residual.data != nullptr, alignment};
}
template <class Out, class D, class W>
Gemm input_product(DType type, const Out& dx, const D& dout, const W& weight) {
    const int alignment = alignment_of({dx.data, dout.data, weight.data});
    return {dout.shape[0], weight.shape[1], dout.shape[1], false, false, type, type, false, alignment};
}
template <class Out, class D, class X>
Gemm weight_product(DType type, DType gradient, const Out& dweight, const D& dout, const X& x, bool adds) {
    const int alignment = alignment_of({dweight.data, dout.data, x.data});
    return {dout.shape[1], x.shape[1], dout.shape[0], true, false, type, gradient, adds, alignment};
}

}  // namespace

template <class T>
void matmul_forward_library(View<T, 2> out, View<const T, 2> x, View<const T, 2> weight,
                            View<const T, 2> residual, Device device) {
    run_gemm(forward_product(dtype_of<T>(), out, x, weight, residual), out.data, x.data, weight.data,
             residual.data, device.workspace, device.stream);
}
template <class T>
void matmul_backward_input_library(View<T, 2> dx, View<const T, 2> dout, View<const T, 2> weight,
                                   Device device) {
    run_gemm(input_product(dtype_of<T>(), dx, dout, weight), dx.data, dout.data, weight.data, nullptr,
             device.workspace, device.stream);
}
template <class T, class G>
void matmul_backward_weight_library(View<G, 2> dweight, View<const T, 2> dout, View<const T, 2> x,
                                    bool accumulate, Device device) {
    run_gemm(weight_product(dtype_of<T>(), dtype_of<G>(), dweight, dout, x, accumulate), dweight.data,
             dout.data, x.data, dweight.data, device.workspace, device.stream);
}

bool library_supports_forward(const Call& c) {
    const Tensor& out = c.operand("out");
    return gemm_supports(
        forward_product(out.dtype, out, c.operand("x"), c.operand("weight"), c.operand("residual")));
}
bool library_supports_backward_input(const Call& c) {
    const Tensor& dx = c.operand("dx");
    return gemm_supports(input_product(dx.dtype, dx, c.operand("dout"), c.operand("weight")));
}
bool library_supports_backward_weight(const Call& c) {
    const Tensor &dweight = c.operand("dweight"), &x = c.operand("x");
    return gemm_supports(
        weight_product(x.dtype, dweight.dtype, dweight, c.operand("dout"), x, c.flag("accumulate")));
}
int64_t library_workspace(const Call&) {
    return gemm_workspace_bytes;
}

template void matmul_forward_library(View<float, 2>, View<const float, 2>, View<const float, 2>,
                                     View<const float, 2>, Device);
template void matmul_forward_library(View<bf16, 2>, View<const bf16, 2>, View<const bf16, 2>,
                                     View<const bf16, 2>, Device);
template void matmul_backward_input_library(View<float, 2>, View<const float, 2>, View<const float, 2>,
                                            Device);
template void matmul_backward_input_library(View<bf16, 2>, View<const bf16, 2>, View<const bf16, 2>, Device);
template void matmul_backward_weight_library(View<float, 2>, View<const float, 2>, View<const float, 2>, bool,
                                             Device);
template void matmul_backward_weight_library(View<float, 2>, View<const bf16, 2>, View<const bf16, 2>, bool,
                                             Device);
template void matmul_backward_weight_library(View<bf16, 2>, View<const bf16, 2>, View<const bf16, 2>, bool,
                                             Device);

}  // namespace llamac
