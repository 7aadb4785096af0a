// One operation's backward is another operation, found by the names in both descriptions:
//
//   rmsnorm_forward (out, rstd;   x, weight; eps)
//   rmsnorm_backward(dx, dweight; dout, x, weight, rstd, dresidual?)
//
// dx is the gradient of x, dout that of out. What has a name of the forward's is kept for the backward,
// dresidual is null. Results whose gradient no backward takes (rstd) have no derivative. `exceptions` holds
// what names do not tell.
#include "torch_autograd.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>

namespace llamac {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;
using Names = std::vector<std::string>;
using Index = std::optional<size_t>;

struct Exception {
    Names backward;                                // operations, instead of the one named alike
    std::map<std::string, std::string> read = {};  // what a backward's argument is called here
    std::string also = "", same = "";              // a gradient, and another that it is the same as
};
const std::map<std::string, Exception> exceptions = {
    {"matmul_forward", {{"matmul_backward_input", "matmul_backward_weight"}, {}, "dresidual", "dout"}},
    {"residual_rmsnorm_forward",
     {{"rmsnorm_backward"}, {{"x", "sum"}, {"dresidual", "dsum"}}, "dresidual", "dx"}},
};

Index find(const Names& names, const std::string& name) {
    const auto at = std::find(names.begin(), names.end(), name);
    return at == names.end() ? Index() : Index(at - names.begin());
}

// The one whose gradient a name stands for: out, for "dout".
Index find_gradient(const Names& names, const std::string& name) {
    return !name.empty() && name[0] == 'd' ? find(names, name.substr(1)) : std::nullopt;
}

// An argument of a backward: null, the gradient of a result, or something kept.
struct Source {
    enum Kind { null, gradient, tensor, number } kind;
    size_t index;
    bool nullable = false;
};

struct Step {
    c10::OperatorHandle op;
    std::vector<Source> arguments;
    std::vector<Index> gives;  // by its result: the argument whose gradient that is
};

struct Number {
    std::string name;
    size_t argument;
    int64_t dimension;  // of the argument, where that is a tensor; from its end, as rows may be several
};

// How an operation's gradients come about.
struct Derivative {
    Form form;
    Names arguments, results;          // tensors come first among the arguments
    std::vector<size_t> tensors;       // kept: arguments, and results counted on behind those
    std::vector<Number> numbers;       // kept
    std::vector<bool> differentiable;  // by result
    std::vector<Step> steps;
    Index also, same, same_result;  // an argument with the gradient of another one, or of a result

    explicit Derivative(const Form& f) : form(f) {
        const Operation& op = *form.op;
        for (const size_t i : form.leading) arguments.push_back(op.operands[i].name);
        for (const size_t d : form.sizes) arguments.push_back(op.dimensions[d]);
        for (const size_t s : form.scalars) arguments.push_back(op.scalars[s].name);
        for (const size_t i : form.results) results.push_back(op.operands[i].name);
        differentiable.resize(results.size());
        const auto known = exceptions.find(op.name);
        Exception exception = known == exceptions.end() ? Exception{} : known->second;
        also = find_gradient(arguments, exception.also);
        same = find_gradient(arguments, exception.same);
        same_result = find_gradient(results, exception.same);
        const size_t stem = op.name.rfind("_forward");
        if (exception.backward.empty() && stem != std::string::npos)
            exception.backward = {op.name.substr(0, stem) + "_backward"};
        for (const std::string& name : exception.backward)
            add_step(Form(find_operation(name), false), exception);
    }

    void keep(AutogradContext& ctx, const std::vector<c10::IValue>& call, const variable_list& found) const {
        variable_list saved, constant;
        for (const size_t i : tensors)
            saved.push_back(i < call.size() ? call[i].toTensor() : found[i - call.size()]);
        for (const Number& n : numbers)
            ctx.saved_data[n.name] = n.argument < form.leading.size()
                                         ? c10::IValue(call[n.argument].toTensor().sym_size(n.dimension))
                                         : call[n.argument];
        for (size_t r = 0; r < found.size(); r++)
            if (!differentiable[r]) constant.push_back(found[r]);
        ctx.save_for_backward(std::move(saved));
        ctx.mark_non_differentiable(constant);
        ctx.set_materialize_grads(false);
    }

    // By argument; wanted likewise.
    variable_list gradients(AutogradContext& ctx, const variable_list& given,
                            std::vector<bool> wanted) const {
        variable_list found(form.leading.size());
        if (std::none_of(given.begin(), given.end(), [](const at::Tensor& g) { return g.defined(); }))
            return found;
        const variable_list saved = ctx.get_saved_variables();
        if (also && same && wanted[*also]) wanted[*same] = true;
        for (const Step& step : steps) run(step, ctx, given, saved, wanted, found);
        if (also) found[*also] = same ? found[*same] : given[*same_result];
        return found;
    }

  private:
    void add_step(const Form& backward, const Exception& exception) {
        const Operation& op = *backward.op;
        Step step{c10::Dispatcher::singleton().findSchemaOrThrow(("llamac::" + op.name).c_str(), ""), {}, {}};
        for (const size_t i : backward.leading) {
            const auto renamed = exception.read.find(op.operands[i].name);
            step.arguments.push_back(
                source(renamed == exception.read.end() ? op.operands[i].name : renamed->second));
            step.arguments.back().nullable = op.operands[i].nullable;
        }
        for (const size_t d : backward.sizes) step.arguments.push_back(source(op.dimensions[d]));
        for (const size_t s : backward.scalars) step.arguments.push_back(source(op.scalars[s].name));
        for (const size_t i : backward.results)
            step.gives.push_back(find_gradient(arguments, op.operands[i].name));
        steps.push_back(std::move(step));
    }

    Source source(const std::string& name) {
        const Index argument = find(arguments, name), result = find(results, name);
        if (argument && *argument >= form.leading.size()) return keep_number({name, *argument, 0});
        if (argument) return keep_tensor(*argument);
        if (result) return keep_tensor(arguments.size() + *result);
        if (const Index of = find_gradient(results, name)) {
            differentiable[*of] = true;
            return {Source::gradient, *of};
        }
        for (size_t a = 0; a < form.leading.size(); a++) {
            const std::vector<Dimension>& shape = form.op->operands[form.leading[a]].shape;
            for (size_t d = 0; d < shape.size(); d++)
                if (shape[d].symbol >= 0 && form.op->dimensions[static_cast<size_t>(shape[d].symbol)] == name)
                    return keep_number(
                        {name, a, static_cast<int64_t>(d) - static_cast<int64_t>(shape.size())});
        }
        return {Source::null, 0};
    }

    Source keep_tensor(size_t index) {
        const auto at = std::find(tensors.begin(), tensors.end(), index);
        const size_t place = static_cast<size_t>(at - tensors.begin());
        if (at == tensors.end()) tensors.push_back(index);
        return {Source::tensor, place};
    }

    Source keep_number(Number number) {
        numbers.push_back(std::move(number));
        return {Source::number, numbers.size() - 1};
    }

    void run(const Step& step, AutogradContext& ctx, const variable_list& given, const variable_list& saved,
             const std::vector<bool>& wanted, variable_list& found) const {
        bool needed = false;
        for (const Index& argument : step.gives) needed |= argument && wanted[*argument];
        if (!needed) return;
        Stack stack;
        for (const Source& s : step.arguments) {
            if (s.kind == Source::tensor)
                stack.emplace_back(saved[s.index]);
            else if (s.kind == Source::number)
                stack.push_back(ctx.saved_data[numbers[s.index].name]);
            else if (s.kind == Source::gradient && given[s.index].defined())
                stack.emplace_back(given[s.index]);
            else if (s.nullable)
                stack.emplace_back();
            else  // nobody asked for this result; the other one that was asked for has its shape
                stack.emplace_back(at::zeros_like(given[0].defined() ? given[0] : given[1]));
        }
        step.op.callBoxed(&stack);
        for (size_t r = 0; r < step.gives.size(); r++)
            if (step.gives[r]) found[*step.gives[r]] = stack[r].toTensor();
    }
};

struct Function : torch::autograd::Function<Function> {
    // The arguments lie on the stack. given: the tensors among them, for the engine; present: a bit for each
    // that is not null.
    static variable_list forward(AutogradContext* ctx, const Derivative* d, at::TensorList /*given*/,
                                 int64_t present, const c10::OperatorHandle* op, c10::DispatchKeySet below,
                                 Stack* stack) {
        const std::vector<c10::IValue> call(stack->end() - static_cast<std::ptrdiff_t>(d->arguments.size()),
                                            stack->end());
        {
            const at::AutoDispatchBelowADInplaceOrView guard;
            op->redispatchBoxed(below, stack);
        }
        variable_list results;
        for (const c10::IValue& v : torch::jit::pop(*stack, d->results.size()))
            results.push_back(v.toTensor());
        ctx->saved_data["derivative"] = reinterpret_cast<int64_t>(d);
        ctx->saved_data["present"] = present;
        d->keep(*ctx, call, results);
        return results;
    }

    // By forward's parameters behind ctx, of which `given` counts as its tensors.
    static variable_list backward(AutogradContext* ctx, const variable_list& given) {
        const auto* d = reinterpret_cast<const Derivative*>(ctx->saved_data["derivative"].toInt());
        const int64_t present = ctx->saved_data["present"].toInt();
        std::vector<bool> wanted(d->form.leading.size());
        size_t edge = 0;
        for (size_t a = 0; a < wanted.size(); a++)
            if (present >> a & 1) wanted[a] = ctx->needs_input_grad(edge++);
        const variable_list found = d->gradients(*ctx, given, wanted);
        variable_list all(1);
        for (size_t a = 0; a < wanted.size(); a++)
            if (present >> a & 1) all.push_back(found[a]);
        all.resize(all.size() + 4);
        return all;
    }
};

std::string_view name_of(const c10::OperatorHandle& op) {
    return std::string_view(op.schema().name()).substr(std::strlen("llamac::"));
}

// On the stack.
struct CallArguments {
    const std::vector<c10::Argument>& known;
    const c10::IValue* given;

    CallArguments(const c10::OperatorHandle& op, const Stack& stack)
        : known(op.schema().arguments()), given(stack.data() + (stack.size() - known.size())) {}

    bool wants_gradient(size_t a) const { return given[a].isTensor() && given[a].toTensor().requires_grad(); }

    // They would be dropped without a word.
    void refuse_forward_derivatives(const c10::OperatorHandle& op) const {
        for (size_t a = 0; a < known.size(); a++)
            TORCH_CHECK_NOT_IMPLEMENTED(!given[a].isTensor() || !given[a].toTensor()._fw_grad(0).defined(),
                                        name_of(op), " has no forward derivative, which ", known[a].name(),
                                        " asks for");
    }
};

// Says it in the backward, and no earlier. Pointer: to nodes, which PyTorch 2.13 counts in another way than 2.11.
template <class Pointer>
Pointer no_derivative(const std::string& operation, const variable_list& of) {
    using torch::autograd::NotImplemented;
    torch::autograd::edge_list next = torch::autograd::collect_next_edges(of);
    if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
        return std::make_shared<NotImplemented>(operation, std::move(next));
    else
        return c10::make_intrusive<NotImplemented>(operation, std::move(next));
}

// What PyTorch's fallback for such operations does, which costs the host half a microsecond where nobody asks for one.
struct Underivable final : c10::OperatorKernel {
    void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
        const CallArguments arguments(op, *stack);
        arguments.refuse_forward_derivatives(op);
        const size_t results = op.schema().returns().size();
        variable_list wanting;
        for (size_t a = 0; at::GradMode::is_enabled() && a < arguments.known.size(); a++) {
            if (!arguments.wants_gradient(a)) continue;
            TORCH_CHECK_NOT_IMPLEMENTED(results, name_of(op), " has no derivative, which ",
                                        arguments.known[a].name(), " asks for: it writes where it is told");
            wanting.push_back(arguments.given[a].toTensor());
        }
        {
            const at::AutoDispatchBelowADInplaceOrView guard;
            op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
        }
        if (wanting.empty()) return;
        const auto node =
            no_derivative<decltype(torch::autograd::Edge::function)>(op.schema().name(), wanting);
        for (const c10::IValue& result : torch::jit::last(*stack, results))
            torch::autograd::set_history(result.toTensor(), node);
    }
};

struct Autograd final : c10::OperatorKernel {
    const Derivative* derivative;
    explicit Autograd(const Derivative* d) : derivative(d) {}

    void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
        const CallArguments arguments(op, *stack);
        arguments.refuse_forward_derivatives(op);
        bool wanted = false;
        for (size_t a = 0; a < derivative->form.leading.size(); a++) wanted |= arguments.wants_gradient(a);
        const c10::DispatchKeySet below = keys & c10::after_autograd_keyset;
        if (!wanted || !at::GradMode::is_enabled()) {
            const at::AutoDispatchBelowADInplaceOrView guard;
            return op.redispatchBoxed(below, stack);
        }
        variable_list given;
        int64_t present = 0;
        for (size_t a = 0; a < derivative->form.leading.size(); a++) {
            if (!arguments.given[a].isTensor()) continue;
            given.push_back(arguments.given[a].toTensor());
            present |= int64_t{1} << a;
        }
        for (at::Tensor& t : Function::apply(derivative, at::TensorList(given), present, &op, below, stack))
            stack->emplace_back(std::move(t));
    }
};

}  // namespace

void define_derivative(torch::Library& library, const Form& form) {
    static std::deque<Derivative> derivatives;  // for good: graphs hold their addresses
    Derivative derivative(form);
    if (derivative.steps.empty()) return refuse_derivative(library, form.name());
    derivatives.push_back(std::move(derivative));
    library.impl(
        form.op->name.c_str(),
        torch::dispatch(c10::DispatchKey::Autograd, torch::CppFunction::makeFromBoxedFunctor(
                                                        std::make_unique<Autograd>(&derivatives.back()))));
}

void refuse_derivative(torch::Library& library, const std::string& name) {
    library.impl(name.c_str(),
                 torch::dispatch(c10::DispatchKey::Autograd,
                                 torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Underivable>())));
}

}  // namespace llamac
