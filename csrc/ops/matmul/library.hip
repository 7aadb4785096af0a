// Matrix products by the vendor's library (core/library_gemm.h): variant `library` of matmul.hip. The residual, or the
// gradient that is there, is added by the product itself.
#include "core/library_gemm.h"
#include "ops/matmul/matmul.h"
#include "ops/operations.h"

namespace llamac {
#if defined(LLAMAC_BLASLT)
namespace {

// The operands are Views of a launch, or Tensors of a Call that asks whether it can be.
template <class X, class W>
Gemm forward_product(DType type, const X& x, const W& weight, bool adds, bool has_bias) {
    return {.rows = x.shape[0],
            .columns = weight.shape[0],
            .inner = x.shape[1],
            .a_transposed = false,
            .b_transposed = true,
            .a = type,
            .b = type,
            .c = type,
            .out = type,
            .adds = adds,
            .has_bias = has_bias};
}
template <class D, class W>
Gemm input_product(DType type, const D& dout, const W& weight, bool adds) {
    return {dout.shape[0], weight.shape[1], dout.shape[1], false, false, type, type, type, type, adds};
}
template <class D, class X>
Gemm weight_product(DType type, DType gradient, const D& dout, const X& x, bool adds) {
    return {dout.shape[1], x.shape[1], dout.shape[0], true, false, type, type, gradient, gradient, adds};
}

bool aligned(const Call& c) {
    uintptr_t bits = 0;
    for (size_t i = 0; i < c.op->operands.size(); i++) bits |= reinterpret_cast<uintptr_t>(c.tensor[i].data);
    return bits % gemm_alignment == 0;
}

// The same product by our own kernels.
void own_product(const Gemm& g, const GemmOperands& o, hipStream_t stream) {
    static const KernelChoices own({"matmul_forward=tiled,naive", "matmul_backward_input=tiled,naive",
                                    "matmul_backward_weight=tiled,naive"});
    Context context = {Backend::device, stream};
    context.kernels = &own;
    const auto tensor = [](const void* data, DType type, int64_t rows, int64_t columns) {
        return data ? make_tensor(const_cast<void*>(data), type, {rows, columns}) : Tensor{};
    };
    const Tensor out = tensor(o.out, g.out, g.rows, g.columns);
    const Tensor a = g.a_transposed ? tensor(o.a, g.a, g.inner, g.rows) : tensor(o.a, g.a, g.rows, g.inner);
    const Tensor b =
        g.b_transposed ? tensor(o.b, g.b, g.columns, g.inner) : tensor(o.b, g.b, g.inner, g.columns);
    if (g.a_transposed)
        matmul_backward_weight(context, {.dweight = out, .dout = a, .x = b, .accumulate = g.adds});
    else if (g.b_transposed)
        matmul_forward(context, {.out = out,
                                 .x = a,
                                 .weight = b,
                                 .residual = tensor(o.c, g.c, g.rows, g.columns),
                                 .bias = o.bias ? make_tensor(const_cast<void*>(o.bias), g.out, {g.columns})
                                                : Tensor{}});
    else
        matmul_backward_input(context, {.dx = out, .dout = a, .weight = b, .accumulate = g.adds});
}

template <class T>
void matmul_forward_library(View<T, 2> out, View<const T, 2> x, View<const T, 2> weight,
                            View<const T, 2> residual, View<const T, 1> bias, LaunchContext context) {
    run_gemm(forward_product(dtype_of<T>(), x, weight, bool(residual), bool(bias)),
             {.out = out.data, .a = x.data, .b = weight.data, .c = residual.data, .bias = bias.data},
             own_product, context.workspace, context.caller.gemms, context.stream);
}
template <class T>
void matmul_backward_input_library(View<T, 2> dx, View<const T, 2> dout, View<const T, 2> weight,
                                   bool accumulate, LaunchContext context) {
    run_gemm(input_product(dtype_of<T>(), dout, weight, accumulate),
             {dx.data, dout.data, weight.data, dx.data}, own_product, context.workspace, context.caller.gemms,
             context.stream);
}
template <class T, class G>
void matmul_backward_weight_library(View<G, 2> dweight, View<const T, 2> dout, View<const T, 2> x,
                                    bool accumulate, LaunchContext context) {
    run_gemm(weight_product(dtype_of<T>(), dtype_of<G>(), dout, x, accumulate),
             {dweight.data, dout.data, x.data, dweight.data}, own_product, context.workspace,
             context.caller.gemms, context.stream);
}

bool library_supports_forward(const Call& c) {
    const Tensor &x = c.operand("x"), &residual = c.operand("residual");
    // In the residual's memory, cuBLASLt gives other bits.
    return aligned(c) && residual.data != c.operand("out").data &&
           gemm_supports(forward_product(x.dtype, x, c.operand("weight"), residual.data != nullptr,
                                         c.operand("bias").data != nullptr),
                         c.launch.stream);
}
bool library_supports_backward_input(const Call& c) {
    const Tensor& dout = c.operand("dout");
    const bool adds = c.adds(c.op->operands.front());
    return aligned(c) &&
           gemm_supports(input_product(dout.dtype, dout, c.operand("weight"), adds), c.launch.stream);
}
bool library_supports_backward_weight(const Call& c) {
    const Tensor &dweight = c.operand("dweight"), &x = c.operand("x");
    const bool adds = c.adds(c.op->operands.front());
    return aligned(c) &&
           gemm_supports(weight_product(x.dtype, dweight.dtype, c.operand("dout"), x, adds), c.launch.stream);
}

}  // namespace

MatmulVariants library_matmul() {
    MatmulVariants of =
        matmul_variants({.name = "library",
                         .idea = "the vendor's library (hipBLASLt, cuBLASLt), the fastest of its candidates",
                         .instantiations = {},
                         .workspace = [](const Call&) { return int64_t{gemm_workspace_bytes}; }},
                        instantiations<LLAMAC_FLOATS(matmul_forward_library)>(),
                        instantiations<LLAMAC_FLOATS(matmul_backward_input_library)>(),
                        instantiations<LLAMAC_FLOATS(matmul_backward_weight_library, float),
                                       matmul_backward_weight_library<bf16, bf16>>());
    constexpr const char* words = "a product that the library takes, operands aligned to 16 bytes";
    of.forward.supports = {
        "a product that the library takes, operands aligned to 16 bytes, out not in the residual's memory",
        library_supports_forward};
    of.backward_input.supports = {words, library_supports_backward_input};
    of.backward_weight.supports = {words, library_supports_backward_weight};
    return of;
}
#else
MatmulVariants library_matmul() {
    return {};
}
#endif

}  // namespace llamac
