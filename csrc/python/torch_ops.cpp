// torch.ops.llamac.*: every described operation, by one boxed kernel that also is its own fake. No operation
// is named here; the schema comes from the description:
//
//   rmsnorm_backward(dx: T[N,C], dweight: G[C] adds_if(accumulate); dout: T[N,C], ..., dresidual?: T[N,C];
//                    accumulate: bool)
//     rmsnorm_backward(Tensor dout, ..., Tensor? dresidual) -> (Tensor dx, Tensor dweight)
//     rmsnorm_backward.out(Tensor dout, ..., Tensor? dresidual, bool accumulate,
//                          *, Tensor(a!) dx, Tensor(b!) dweight) -> ()
//
// The first allocates its outputs, without those that may be null, unless their size is fixed (cross_entropy's mean);
// G and M, which no input may tell, are T there. A size that no tensor tells is an argument by its letter
// (repeat_kv_forward(Tensor x, SymInt NH)); an operation without any tensor takes dtype and device too. `.out` writes
// where it is told, to null where that is allowed; an operation whose outputs may all be null allocates none. Operands
// marked ~ are mutated arguments of both forms. A letter marked rows(N) may be any number of dimensions: results have
// those of the first tensor that has it. An i32 that may be strided may be an int64, as PyTorch's targets are: its values
// are those of the lower halves.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "torch_autograd.h"
#include "torch_compute.h"

namespace llamac {
namespace {

bool begins_with_rows(const Operation& op, const Operand& o) {
    return !o.shape.empty() && o.shape[0].symbol >= 0 &&
           op.dimensions[static_cast<size_t>(o.shape[0].symbol)].splits;
}

// One call's arguments, taken off the stack.
struct Arguments {
    const Form& form;
    std::vector<at::Tensor> tensors;        // by operand
    c10::SymDimVector size;                 // by dimension; -1: not told yet
    std::optional<c10::SymDimVector> rows;  // what the rows are made of
    std::vector<Scalar> scalars;            // by the description's order
    at::ScalarType dtype = at::kFloat;
    c10::Device device = at::kCPU;

    Arguments(const Form& f, torch::jit::Stack& stack)
        : form(f),
          tensors(f.op->operands.size()),
          size(f.op->dimensions.size(), -1),
          scalars(f.op->scalars.size(), Scalar(false)) {
        const size_t count =
            f.leading.size() + f.sizes.size() + f.scalars.size() + f.last.size() + (f.factory ? 2 : 0);
        auto argument = stack.end() - static_cast<std::ptrdiff_t>(count);
        const auto take_tensor = [&](size_t i) {
            if (!argument->isNone()) tensors[i] = std::move(*argument).toTensor();
            argument++;
        };
        for (const size_t i : f.leading) take_tensor(i);
        for (const size_t d : f.sizes) size[d] = (argument++)->toSymInt();
        for (const size_t i : f.scalars) {
            const c10::IValue& v = *argument++;
            scalars[i] = v.isBool()  ? Scalar(v.toBool())
                         : v.isInt() ? Scalar(v.toInt())
                                     : Scalar(v.toDouble());
        }
        for (const size_t i : f.last) take_tensor(i);
        if (f.factory) dtype = argument[0].toScalarType(), device = argument[1].toDevice();
        torch::jit::drop(stack, count);
        for (size_t i = tensors.size(); i-- > 0;)
            if (tensors[i].defined()) device = tensors[i].device();
    }

    // Else one without memory among others would make the call a fake of itself.
    void check_devices() const {
        const Operation& op = *form.op;
        for (size_t i = 0; i < tensors.size(); i++)
            if (tensors[i].defined())
                TORCH_CHECK_VALUE(tensors[i].device() == device, op.name, ": ", op.operands[i].name,
                                  " is on ", tensors[i].device().str(), ", expected ", device.str());
    }

    // Sizes by the tensors' shapes, inputs first, compared where they are known: symbolic ones as well.
    void bind_sizes() {
        const Operation& op = *form.op;
        for (size_t k = 0; k < tensors.size(); k++) {
            const size_t i = op.in_order(k);
            if (tensors[i].defined()) bind_shape(op.operands[i], tensors[i].sym_sizes());
        }
    }

    void allocate_results() {
        for (const size_t i : form.results) {
            const Operand& o = form.op->operands[i];
            const bool split = rows && begins_with_rows(*form.op, o);
            c10::SymDimVector shape = split ? *rows : c10::SymDimVector();
            for (size_t k = split; k < o.shape.size(); k++) {
                const Dimension& d = o.shape[k];
                shape.push_back((d.symbol < 0 ? c10::SymInt(1) : size[static_cast<size_t>(d.symbol)]) *
                                d.factor / d.divisor);
            }
            tensors[i] = at::empty_symint(shape, at::TensorOptions(device).dtype(result_type(o)));
            if (form.factory) device = tensors[i].device();  // "cuda" is one of them
        }
    }

  private:
    void bind_shape(const Operand& o, c10::SymIntArrayRef found) {
        const Operation& op = *form.op;
        const size_t rank = o.shape.size();
        const bool split = found.size() != rank && begins_with_rows(op, o) && found.size() + 1 >= rank;
        TORCH_CHECK_VALUE(split || found.size() == rank, op.name, ": ", o.name, " has shape ", found,
                          ", expected ", dimension_text(op, o));
        const size_t leading = split ? found.size() + 1 - rank : 1;  // what the first dimension is made of
        if (begins_with_rows(op, o)) {
            const c10::SymIntArrayRef own = found.slice(0, leading);
            if (!rows) rows.emplace(own.begin(), own.end());
            bool same = rows->size() == leading;
            for (size_t d = 0; same && d < leading; d++)
                same = own[d].sym_eq((*rows)[d]).expect_true(__FILE__, __LINE__);
            TORCH_CHECK_VALUE(same, op.name, ": ", o.name, " has shape ", found, ", expected rows ", *rows);
        }
        for (size_t d = 0; d < rank; d++) {
            const Dimension& dim = o.shape[d];
            const c10::SymInt size_here = d > 0    ? found[d - 1 + leading]
                                          : !split ? found[0]
                                                   : c10::multiply_integers(found.slice(0, leading));
            const c10::SymInt scaled = size_here * dim.divisor;
            c10::SymInt expected = dim.factor;
            if (dim.symbol >= 0) {
                c10::SymInt& known = size[static_cast<size_t>(dim.symbol)];
                if (!known.is_symbolic() && known.as_int_unchecked() < 0) known = scaled / dim.factor;
                expected = known * dim.factor;
            }
            TORCH_CHECK_VALUE(scaled.sym_eq(expected).expect_true(__FILE__, __LINE__), op.name, ": ", o.name,
                              " has shape ", found, ", expected ", dimension_text(op, o), " with dimension ",
                              d, " = ", expected / dim.divisor);
        }
    }

    at::ScalarType result_type(const Operand& o) const {
        if (o.letter < 0) return torch_type(o.dtype);
        at::ScalarType storage = dtype;  // that of the first letter
        for (size_t i = tensors.size(); i-- > 0;) {
            if (!tensors[i].defined()) continue;
            const int letter = form.op->operands[i].letter;
            if (letter == o.letter) return tensors[i].scalar_type();
            if (letter == 0) storage = tensors[i].scalar_type();
        }
        const std::optional<DType> known = find_dtype(storage);
        return known ? torch_type(form.op->types[static_cast<size_t>(o.letter)].beside(*known)) : storage;
    }
};

// One form of one operation.
struct Kernel final : c10::OperatorKernel {
    Form form;
    bool fake;
    Kernel(const Form& f, bool is_fake) : form(f), fake(is_fake) {}

    void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) const {
        Arguments a(form, *stack);
        a.check_devices();
        a.bind_sizes();
        a.allocate_results();
        if (fake || a.device.is_meta())
            check_types(*form.op, a.tensors, a.scalars);
        else
            compute(*form.op, a.tensors, a.scalars);
        for (const size_t i : form.results) stack->emplace_back(std::move(a.tensors[i]));
    }
};

void define(torch::Library& library, const Form& form) {
    const std::string name = form.name();
    library.def(torch::schema(form.schema().c_str()), {at::Tag::pt2_compliant_tag});
    const auto implement = [&](c10::DispatchKey key) {
        library.impl(name.c_str(),
                     torch::dispatch(key, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(
                                              form, key == c10::DispatchKey::Meta))));
    };
    implement(c10::DispatchKey::Meta);
    // Without a tensor there is no backend to go by: the kernel itself looks at the device.
    if (form.factory) return implement(c10::DispatchKey::BackendSelect);
    implement(c10::DispatchKey::CPU);
    implement(c10::DispatchKey::CUDA);  // ROCm's torch calls its devices so too
}

}  // namespace
}  // namespace llamac

// Called once by llamac/extension.py. TORCH_LIBRARY would run while the library is loaded, maybe before the operations
// have registered themselves: files are initialised in the order in which they were linked.
extern "C" __attribute__((visibility("default"))) void llamac_register_operations(const char* without_gpu) {
    llamac::raise_failed_checks();
    llamac::refuse_gpus(without_gpu);
    llamac::check_derivatives();
    const auto writes = [](const llamac::Operation& op) {  // else its outputs are all read, too
        return std::any_of(op.operands.begin(), op.operands.begin() + op.outputs,
                           [](const llamac::Operand& o) { return !o.in_place; });
    };
    static torch::Library library(torch::Library::DEF, "llamac", std::nullopt, __FILE__, __LINE__);
    for (const llamac::Operation* op : llamac::operations()) {
        const llamac::Form form(*op, false);
        llamac::define(library, form);
        if (writes(*op)) llamac::define(library, llamac::Form(*op, true));
    }
    for (const llamac::Operation* op : llamac::operations()) {
        const llamac::Form form(*op, false), out(*op, true);
        const bool gives = !form.results.empty();
        if (gives && !form.factory) llamac::define_derivative(library, form);
        if (!gives) llamac::refuse_derivative(library, form.name());
        if (writes(*op)) llamac::refuse_derivative(library, out.name());
    }
}
