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
// G and M, which no input may tell, are T there, and f32 where T is not told either. A size that no tensor tells is an
// argument by its letter (repeat_kv_forward(Tensor x, SymInt NH)). `.out` writes where it is told, to null where that is
// allowed; an operation whose outputs may all be null allocates none, and one without inputs has this form alone: no tensor
// would say where it computes. Operands marked ~ are mutated arguments of both
// forms. A letter marked rows(N) may be any number of dimensions: results have
// those of the first tensor that has it. An i32 that may be strided may be an int64, as PyTorch's targets are: its values
// are those of the lower halves.
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "torch_autograd.h"
#include "torch_compute.h"

namespace llamac {
namespace {

bool begins_with_rows(const Operation& op, const Operand& o) {
    return !o.shape.empty() && o.shape[0].symbol >= 0 && op.dimensions[o.shape[0].symbol].splits;
}

// For sizes that may be symbols, and for those that may not.
c10::SymIntArrayRef shape_of(const at::Tensor& t, c10::SymInt) {
    return t.sym_sizes();
}
at::IntArrayRef shape_of(const at::Tensor& t, int64_t) {
    return t.sizes();
}
bool is_known(const c10::SymInt& size) {
    return size.is_symbolic() || size.as_int_unchecked() >= 0;
}
bool is_known(int64_t size) {
    return size >= 0;
}
bool are_equal(const c10::SymInt& a, const c10::SymInt& b) {
    return a.sym_eq(b).expect_true(__FILE__, __LINE__);
}
bool are_equal(int64_t a, int64_t b) {
    return a == b;
}

// One call's arguments, taken off the stack. Size: int64_t, or c10::SymInt where sizes may be symbols, of which every
// comparison is a call. Most operations need no memory of the heap.
template <class Size>
struct Arguments {
    using Shape = c10::ArrayRef<Size>;

    const Form& form;
    c10::SmallVector<at::Tensor, 8> tensors;  // by operand
    c10::SmallVector<Size, 8> size;           // by dimension; -1: not told yet
    std::optional<Shape> rows;                // the dimensions of the rows
    c10::SmallVector<Scalar, 8> scalars;      // by the description's order
    c10::Device device = at::kCPU;

    Arguments(const Form& f, torch::jit::Stack& stack)
        : form(f),
          tensors(f.op->operands.size()),
          size(f.op->dimensions.size(), -1),
          scalars(f.op->scalars.size(), Scalar(false)) {
        auto argument = stack.end() - static_cast<std::ptrdiff_t>(f.arguments);
        const auto take_tensor = [&](size_t i) {
            if (!argument->isNone()) tensors[i] = std::move(*argument).toTensor();
            argument++;
        };
        for (const size_t i : f.leading) take_tensor(i);
        for (const size_t d : f.sizes) size[d] = (argument++)->template to<Size>();
        for (const size_t i : f.scalars) {
            const c10::IValue& v = *argument++;
            scalars[i] = v.isBool()  ? Scalar(v.toBool())
                         : v.isInt() ? Scalar(v.toInt())
                                     : Scalar(v.toDouble());
        }
        for (const size_t i : f.last) take_tensor(i);
        torch::jit::drop(stack, f.arguments);
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
            if (tensors[i].defined()) bind_shape(op.operands[i], shape_of(tensors[i], Size()));
        }
    }

    void allocate_results() {
        for (const size_t i : form.results) {
            const Operand& o = form.op->operands[i];
            const bool split = rows && begins_with_rows(*form.op, o);
            c10::SmallVector<Size, 5> shape;
            if (split) shape.append(rows->begin(), rows->end());
            for (size_t k = split; k < o.shape.size(); k++) {
                const Dimension& d = o.shape[k];
                if (d.is_letter())
                    shape.push_back(size[d.symbol]);
                else
                    shape.push_back((d.symbol < 0 ? Size(1) : size[d.symbol]) * d.factor / d.divisor);
            }
            tensors[i] = allocate(Shape(shape), result_type(o), device);
        }
    }

  private:
    void bind_shape(const Operand& o, Shape found) {
        const Operation& op = *form.op;
        const size_t rank = o.shape.size();
        const bool has_rows = begins_with_rows(op, o);
        const bool split = has_rows && found.size() != rank && found.size() + 1 >= rank;
        TORCH_CHECK_VALUE(split || found.size() == rank, op.name, ": ", o.name, " has shape ", found,
                          ", expected ", dimension_text(op, o));
        const size_t leading = split ? found.size() + 1 - rank : 1;  // dimensions in the first one
        if (has_rows) bind_rows(o, found, found.slice(0, leading));
        for (size_t d = 0; d < rank; d++)
            bind_dimension(o, found, d,
                           d > 0    ? found[d - 1 + leading]
                           : !split ? found[0]
                                    : c10::multiply_integers(found.slice(0, leading)));
    }

    void bind_rows(const Operand& o, Shape found, Shape own) {
        if (!rows) {
            rows = own;
            return;
        }
        bool same = rows->size() == own.size();
        for (size_t d = 0; same && d < own.size(); d++) same = are_equal(own[d], (*rows)[d]);
        TORCH_CHECK_VALUE(same, form.op->name, ": ", o.name, " has shape ", found, ", expected rows ", *rows);
    }

    void bind_dimension(const Operand& o, Shape found, size_t d, const Size& here) {
        const Operation& op = *form.op;
        const Dimension& dim = o.shape[d];
        const Size scaled = dim.divisor == 1 ? here : here * dim.divisor;
        Size expected = dim.factor;
        if (dim.symbol >= 0) {
            Size& known = size[dim.symbol];
            if (!is_known(known)) known = dim.factor == 1 ? scaled : scaled / dim.factor;
            expected = known * dim.factor;
        }
        TORCH_CHECK_VALUE(are_equal(scaled, expected), op.name, ": ", o.name, " has shape ", found,
                          ", expected ", dimension_text(op, o), " with dimension ", d, " = ",
                          expected / dim.divisor);
    }

    at::ScalarType result_type(const Operand& o) const {
        if (o.letter < 0) return torch_type(o.dtype);
        at::ScalarType storage =
            at::kFloat;  // that of the first letter; of its arithmetic, where no argument has it
        bool told = false;
        for (size_t i = tensors.size(); i-- > 0;) {
            if (!tensors[i].defined()) continue;
            const int letter = form.op->operands[i].letter;
            if (letter == o.letter) return tensors[i].scalar_type();
            const bool computes = letter > 0 && form.op->types[letter].arithmetic_of == 0;
            if (letter == 0 || (computes && !told)) storage = tensors[i].scalar_type();
            told = told || letter == 0;
        }
        const std::optional<DType> known = find_dtype(storage);
        return known ? torch_type(form.op->types[o.letter].beside(*known)) : storage;
    }
};

// One form of one operation. Size: as Arguments has it; only of sizes that may be symbols is it a fake.
template <class Size>
struct Kernel final : c10::OperatorKernel {
    Form form;
    bool fake;
    Kernel(const Form& f, bool is_fake) : form(f), fake(is_fake) {}

    void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) const {
        Arguments<Size> a(form, *stack);
        a.check_devices();
        a.bind_sizes();
        a.allocate_results();
        if (fake || a.device.is_meta())
            check_types(*form.op, a.tensors, a.scalars);
        else
            compute(*form.op, a.tensors, a.scalars, form.fresh);
        for (const size_t i : form.results) stack->emplace_back(std::move(a.tensors[i]));
    }
};

template <class Size>
void implement(torch::Library& library, const Form& form, c10::DispatchKey key) {
    auto kernel = std::make_unique<Kernel<Size>>(form, key == c10::DispatchKey::Meta);
    library.impl(form.name().c_str(),
                 torch::dispatch(key, torch::CppFunction::makeFromBoxedFunctor(std::move(kernel))));
}

void define(torch::Library& library, const Form& form) {
    library.def(torch::schema(form.schema().c_str()), {at::Tag::pt2_compliant_tag});
    implement<c10::SymInt>(library, form, c10::DispatchKey::Meta);
    implement<int64_t>(library, form, c10::DispatchKey::CPU);
    implement<int64_t>(library, form, c10::DispatchKey::CUDA);  // ROCm's torch calls its devices so too
}

}  // namespace
}  // namespace llamac

// Called once by llamac/base/extension.py. TORCH_LIBRARY would run while the library is loaded, maybe before the
// operations have registered themselves: files are initialized in the order in which they were linked.
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
        if (!form.leading.empty()) llamac::define(library, form);
        if (writes(*op)) llamac::define(library, llamac::Form(*op, true));
    }
    for (const llamac::Operation* op : llamac::operations()) {
        const llamac::Form form(*op, false), out(*op, true);
        const bool gives = !form.leading.empty() && !form.results.empty();
        if (gives) llamac::define_derivative(library, form);
        if (!form.leading.empty() && !gives) llamac::refuse_derivative(library, form.name());
        if (writes(*op)) llamac::refuse_derivative(library, out.name());
    }
}
