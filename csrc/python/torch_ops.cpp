// torch.ops.llamac.*: every described operation, by one boxed kernel that also is its own fake. No operation
// is named here; the schema comes from the description:
//
//   rmsnorm_backward(dx: T[N,C], dweight +=: G[C]; dout: T[N,C], ..., dresidual?: T[N,C]; accumulate: bool)
//     rmsnorm_backward(Tensor dout, ..., Tensor? dresidual) -> (Tensor dx, Tensor dweight)
//     rmsnorm_backward.out(Tensor dout, ..., Tensor? dresidual, bool accumulate,
//                          *, Tensor(a!) dx, Tensor(b!) dweight) -> ()
//
// The first allocates its outputs, without those that may be null, unless their size is fixed (cross_entropy's mean);
// G and M, which no input may tell, are T there. A size that no tensor tells is an argument by its letter
// (repeat_kv_forward(Tensor x, SymInt NH)); an operation without any tensor takes dtype and device too. `.out` writes
// where it is told, to null where that is allowed. Operands marked ~ are mutated arguments of both forms. An N that
// comes first may be any number of dimensions: results have those of the first tensor that has it. An i32 that may be
// strided may be an int64, as PyTorch's targets are: its values are those of the lower halves.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "torch_autograd.h"

namespace llamac {
namespace {

at::ScalarType torch_type(DType t) {
    constexpr at::ScalarType types[] = {at::kFloat, at::kBFloat16, at::kDouble, at::kInt};
    return types[static_cast<size_t>(t)];
}

// An int64 whose lower halves are a described int32 with gaps; every device here is little-endian.
bool has_halves(const Operand& o, const at::Tensor& t) {
    return t.scalar_type() == at::kLong && !o.type && o.dtype == DType::i32 && o.strided &&
           o.shape.size() == 1;
}

DType type_of(const Operation& op, const Operand& o, const at::Tensor& t) {
    if (has_halves(o, t)) return DType::i32;
    for (const DType d : {DType::f32, DType::bf16, DType::f64, DType::i32})
        if (t.scalar_type() == torch_type(d)) return d;
    fail(op.name, ": ", o.name, " is ", c10::toString(t.scalar_type()), ", expected f32, bf16, f64 or i32");
}

bool begins_with_rows(const Operation& op, const Operand& o) {
    return !o.shape.empty() && o.shape[0].symbol >= 0 &&
           op.dimensions[static_cast<size_t>(o.shape[0].symbol)] == "N";
}

// One call's arguments, taken off the stack.
struct Arguments {
    const Form& form;
    std::vector<at::Tensor> tensors;        // by operand
    c10::SymDimVector size;                 // by dimension; -1: not told yet
    std::optional<c10::SymDimVector> rows;  // what N is made of
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

    // Several devices, one without memory among them; an ignore_index that no int32, or lower half of a target, is.
    void refuse_misfits() const {
        const Operation& op = *form.op;
        for (size_t i = 0; i < tensors.size(); i++) {
            if (!tensors[i].defined()) continue;
            const std::string& name = op.operands[i].name;
            TORCH_CHECK_VALUE(tensors[i].device() == device, op.name, ": ", name, " is on ",
                              tensors[i].device().str(), ", expected ", device.str());
        }
        if (const auto none = ignore_index())
            TORCH_CHECK_VALUE(static_cast<int32_t>(*none) == *none, op.name, ": ignore_index is ", *none,
                              ", expected one of 32 bits");
    }

    std::optional<int64_t> ignore_index() const {
        const std::vector<ScalarInfo>& known = form.op->scalars;
        for (size_t s = 0; s < known.size(); s++)
            if (known[s].name == "ignore_index") return scalars[s].integer;
        return std::nullopt;
    }

    // Sizes by the tensors' shapes, inputs first, compared where they are known: symbolic ones as well.
    void bind_sizes() {
        const Operation& op = *form.op;
        const size_t n = tensors.size();
        for (size_t k = 0; k < n; k++) {
            const size_t i = (k + static_cast<size_t>(op.outputs)) % n;
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
        if (!o.type) return torch_type(o.dtype);
        at::ScalarType storage = dtype;
        for (size_t i = tensors.size(); i-- > 0;) {
            if (!tensors[i].defined()) continue;
            const char letter = form.op->operands[i].type;
            if (letter == o.type) return tensors[i].scalar_type();
            if (letter == 'T') storage = tensors[i].scalar_type();
        }
        return o.type != 'A' ? storage : storage == at::kDouble ? at::kDouble : at::kFloat;
    }
};

// Values that address memory, where the host can see them: in bounds, or the scalar that means "none".
void check_bounds(const Arguments& a, const std::vector<Tensor>& views) {
    const Operation& op = *a.form.op;
    for (size_t i = 0; i < views.size(); i++) {
        const Operand& o = op.operands[i];
        if (o.bound < 0 || views[i].dtype != DType::i32) continue;
        const int64_t below = a.size[static_cast<size_t>(o.bound)].expect_int();
        const int64_t none = a.ignore_index().value_or(0);
        const bool wide = has_halves(o, a.tensors[i]);
        for (int64_t n = 0; n < views[i].elements(); n++) {
            const int32_t* at = views[i].as<int32_t>() + n * views[i].stride[0];
            const int64_t value = wide ? *reinterpret_cast<const int64_t*>(at) : *at;
            if (value != none && (value < 0 || value >= below))
                fail(op.name, ": ", o.name, " holds ", value, ", expected values from 0 to ", below - 1);
        }
    }
}

// One form of one operation.
struct Kernel final : c10::OperatorKernel {
    Form form;
    bool fake;
    Kernel(const Form& f, bool is_fake) : form(f), fake(is_fake) {}

    void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) const {
        Arguments a(form, *stack);
        a.refuse_misfits();
        a.bind_sizes();
        a.allocate_results();
        try {
            if (fake || a.device.is_meta())
                check_types(a);
            else
                compute(a);
        } catch (const Error& e) {
            TORCH_CHECK_VALUE(false, e.what());
        }
        for (const size_t i : form.results) stack->emplace_back(std::move(a.tensors[i]));
    }

  private:
    // As run() does, so that a compiler's user hears of it before the graph runs.
    static void check_types(const Arguments& a) {
        const Operation& op = *a.form.op;
        Types types;
        for (size_t k = 0; k < a.tensors.size(); k++) {
            const size_t i = (k + static_cast<size_t>(op.outputs)) % a.tensors.size();
            const Operand& o = op.operands[i];
            if (a.tensors[i].defined()) types.check(op, o, type_of(op, o, a.tensors[i]));
        }
    }

    // The distance of rows that several dimensions number, where it is one; of one number for all rows it is 0.
    static std::optional<int64_t> distance_of_rows(const at::Tensor& t) {
        if (t.is_contiguous()) return 1;
        int64_t distance = 0, rows = 1;
        for (int64_t d = t.dim() - 1; d >= 0; d--) {
            if (t.size(d) == 1) continue;
            if (rows == 1) distance = t.stride(d);
            if (t.stride(d) != rows * distance) return std::nullopt;
            rows *= t.size(d);
        }
        return distance;
    }

    // Contiguous where the description wants it, copied if it has to be. What is written cannot be a copy:
    // run() refuses it.
    static void arrange(const Operand& o, at::Tensor& t) {
        if (o.output || t.is_contiguous()) return;
        const bool in_rows = t.dim() <= 1 || t.size(-1) <= 1 || t.stride(-1) == 1;
        const bool as_described = o.shape.size() == 1
                                      ? distance_of_rows(t).has_value()
                                      : in_rows && t.dim() == static_cast<int64_t>(o.shape.size());
        if (!o.strided || !as_described) t = t.contiguous();
    }

    static Tensor view(const Operation& op, const Operand& o, const at::Tensor& t) {
        Tensor r;
        r.data = t.data_ptr();
        r.dtype = type_of(op, o, t);
        r.rank = static_cast<int>(o.shape.size());
        const int64_t step = has_halves(o, t) ? 2 : 1;
        if (t.dim() == r.rank) {
            for (int d = 0; d < r.rank; d++) r.shape[d] = t.size(d), r.stride[d] = step * t.stride(d);
            return r;
        }
        const bool rows_alone = o.strided && !o.output && r.rank == 1;
        if (!rows_alone && !t.is_contiguous()) fail(op.name, ": ", o.name, " must be contiguous");
        int64_t rest = rows_alone ? distance_of_rows(t).value() : 1;
        for (int d = r.rank - 1; d > 0; d--) {
            r.shape[d] = t.size(d - r.rank), r.stride[d] = rest;
            rest *= r.shape[d];
        }
        r.shape[0] = 1, r.stride[0] = step * rest;
        for (int64_t d = 0; d <= t.dim() - r.rank; d++) r.shape[0] *= t.size(d);
        return r;
    }

    void compute(Arguments& a) const {
        const Operation& op = *form.op;
        const size_t n = a.tensors.size();
        std::vector<Tensor> views(n);
        for (size_t k = 0; k < n; k++) {  // inputs first: outputs have followed them
            const size_t i = (k + static_cast<size_t>(op.outputs)) % n;
            at::Tensor& t = a.tensors[i];
            if (!t.defined()) continue;
            arrange(op.operands[i], t);
            views[i] = view(op, op.operands[i], t);
        }
        // Autograd refuses saved tensors that have changed since.
        for (size_t i = 0; i < a.tensors.size(); i++)
            if (op.operands[i].output && a.tensors[i].defined() && !a.tensors[i].is_inference())
                a.tensors[i].unsafeGetTensorImpl()->bump_version();
        if (a.device.is_cpu()) {
            check_bounds(a, views);
            return run(op, std::move(views), a.scalars);
        }
        run_on_device(op, std::move(views), a);
    }

    // On the current stream. The workspace comes from torch's allocator, which knows of streams and graphs.
    static void run_on_device(const Operation& op, std::vector<Tensor> views, const Arguments& a) {
        const c10::DeviceGuard guard(a.device);
        const c10::impl::VirtualGuardImpl streams(a.device.type());
        at::Tensor memory;
        Workspace workspace;
        workspace.source = [&](int64_t bytes) {
            memory = at::empty({bytes}, at::TensorOptions(a.device).dtype(at::kByte));
            return memory.data_ptr();
        };
        const Queue queue{Where::device,
                          static_cast<hipStream_t>(streams.getStream(a.device).native_handle()), &workspace};
        run(op, std::move(views), a.scalars, queue);
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
extern "C" __attribute__((visibility("default"))) void llamac_register_operations() {
    llamac::raise_failed_checks();
    static torch::Library library(torch::Library::DEF, "llamac", std::nullopt, __FILE__, __LINE__);
    for (const llamac::Operation* op : llamac::operations()) {
        const llamac::Form form(*op, false);
        llamac::define(library, form);
        if (!form.results.empty()) llamac::define(library, llamac::Form(*op, true));
    }
    for (const llamac::Operation* op : llamac::operations()) {
        const llamac::Form form(*op, false), out(*op, true);
        const bool gives = !form.results.empty();
        if (gives && !form.factory) llamac::define_derivative(library, form);
        llamac::refuse_derivative(library, gives ? out : form);
    }
}
