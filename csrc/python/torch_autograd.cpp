// One operation's backward is another operation, or several, as the clauses `derivative` and `grad` of its description
// say. Operands of a backward that they do not list are null. Results whose gradient no backward takes (rstd) have no
// derivative.
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

const std::string saved_numbers = "numbers";  // the name in a context

Index find(const Names& names, const std::string& name) {
    const auto at = std::find(names.begin(), names.end(), name);
    return at == names.end() ? Index() : Index(at - names.begin());
}

// An argument of a backward: null, the gradient of a result, that of an argument which a step before has found, or something
// kept.
struct Source {
    enum Kind { null, gradient, found, tensor, number } kind;
    size_t index;
    bool nullable = false;
};

struct Step {
    c10::OperatorHandle op;
    std::vector<Source> arguments;
    std::vector<Index> gives;  // by its result: the argument whose gradient that is
};

struct Number {
    size_t argument;
    int64_t dimension;  // of the argument, where that is a tensor; from its end, as rows may be several
};

// How an operation's gradients come about.
struct Gradients {
    Form form;
    Names arguments, results;          // tensors come first among the arguments
    std::vector<size_t> tensors;       // kept: arguments, and results counted on behind those
    std::vector<Number> numbers;       // kept
    std::vector<bool> differentiable;  // by result
    std::vector<Step> steps;
    Index also, same, same_result;  // an argument with the gradient of another one, or of a result

    explicit Gradients(const Form& f) : form(f) {
        const Operation& op = *form.op;
        for (const size_t i : form.leading) arguments.push_back(op.operands[i].name);
        for (const size_t d : form.sizes) arguments.push_back(op.dimensions[d].name);
        for (const size_t s : form.scalars) arguments.push_back(op.scalars[s].name);
        for (const size_t i : form.results) results.push_back(op.operands[i].name);
        differentiable.resize(results.size());
        for (const SameGradient& g : op.same_gradients) {
            also = find(arguments, name_of(g.input));
            same = find(arguments, name_of(g.source));
            same_result = find(results, name_of(g.source));
        }
        for (const Derivative& d : op.derivatives) add_step(Form(find_operation(d.operation), false), d);
    }

    // The tensors of a call that a backward reads, those of results to be added, and numbers.
    struct Kept {
        variable_list tensors;
        std::vector<c10::IValue> numbers;
    };

    Kept keep(const c10::IValue* call, int64_t present) const {
        Kept kept;
        kept.tensors.reserve(tensors.size());
        for (const size_t i : tensors)
            kept.tensors.push_back(i < arguments.size() && !call[i].isNone() ? call[i].toTensor()
                                                                             : at::Tensor());
        kept.numbers.reserve(numbers.size() + 2);
        for (const Number& n : numbers)
            if (n.argument >= form.leading.size())
                kept.numbers.push_back(call[n.argument]);
            else if (call[n.argument].isTensor())
                kept.numbers.emplace_back(call[n.argument].toTensor().sym_size(n.dimension));
            else  // of an argument that is null, whose gradient nobody asks for
                kept.numbers.emplace_back(int64_t{0});
        kept.numbers.emplace_back(reinterpret_cast<int64_t>(this));
        kept.numbers.emplace_back(present);
        return kept;
    }

    void save(AutogradContext& ctx, Kept kept, const variable_list& found) const {
        for (size_t k = 0; k < tensors.size(); k++)
            if (tensors[k] >= arguments.size()) kept.tensors[k] = found[tensors[k] - arguments.size()];
        variable_list constant;
        for (size_t r = 0; r < found.size(); r++)
            if (!differentiable[r]) constant.push_back(found[r]);
        // One entry: each is an allocation or two.
        ctx.saved_data[saved_numbers] = c10::ivalue::Tuple::create(std::move(kept.numbers));
        ctx.save_for_backward(std::move(kept.tensors));
        ctx.mark_non_differentiable(constant);
        ctx.set_materialize_grads(false);
    }

    // By argument; wanted likewise.
    variable_list gradients(AutogradContext& ctx, const std::vector<c10::IValue>& kept,
                            const variable_list& given, std::vector<bool> wanted) const {
        variable_list found(form.leading.size());
        if (std::none_of(given.begin(), given.end(), [](const at::Tensor& g) { return g.defined(); }))
            return found;
        const variable_list saved = ctx.get_saved_variables();
        if (also && same && wanted[*also]) wanted[*same] = true;
        // From the last step on: what it asks for, one before it gives.
        for (auto step = steps.rbegin(); step != steps.rend(); step++)
            for (const Source& s : step->arguments)
                if (s.kind == Source::found && is_needed(*step, wanted)) wanted[s.index] = true;
        for (const Step& step : steps) run(step, kept, given, saved, wanted, found);
        if (also) found[*also] = same ? found[*same] : given[*same_result];
        return found;
    }

  private:
    const std::string& name_of(int operand) const { return form.op->operands[operand].name; }

    void add_step(const Form& backward, const Derivative& described) {
        const Operation& op = *backward.op;
        Step step{c10::Dispatcher::singleton().findSchemaOrThrow(("llamac::" + op.name).c_str(), ""), {}, {}};
        const auto binding = [](const std::vector<Derivative::Binding>& all, const std::string& operand) {
            const auto found = std::find_if(
                all.begin(), all.end(), [&](const Derivative::Binding& b) { return b.operand == operand; });
            return found == all.end() ? nullptr : &*found;
        };
        for (const size_t i : backward.leading) {
            const Derivative::Binding* b = binding(described.takes, op.operands[i].name);
            step.arguments.push_back(b ? source(*b) : Source{Source::null, 0});
            step.arguments.back().nullable = op.operands[i].nullable;
        }
        for (const size_t d : backward.sizes) step.arguments.push_back(size_of(backward, described, d));
        for (const size_t s : backward.scalars) {
            const std::string& name = op.scalars[s].name;
            step.arguments.push_back(keep_number({*find(arguments, name), 0}));
        }
        for (const size_t i : backward.results) {
            const Derivative::Binding* b = binding(described.gives, op.operands[i].name);
            step.gives.push_back(b ? find(arguments, name_of(b->source)) : std::nullopt);
        }
        steps.push_back(std::move(step));
    }

    Source source(const Derivative::Binding& b) {
        const Index argument = find(arguments, name_of(b.source)), result = find(results, name_of(b.source));
        if (b.gradient && argument) return {Source::found, *argument};
        if (!b.gradient) return keep_tensor(argument ? *argument : arguments.size() + *result);
        differentiable[*result] = true;
        return {Source::gradient, *result};
    }

    // A gradient has the shape of its argument; else a letter is the same size in both operations.
    Source size_of(const Form& backward, const Derivative& described, size_t dimension) {
        for (const Derivative::Binding& b : described.gives) {
            const int gradient = backward.op->find_operand(b.operand);
            const std::vector<Dimension>& shape = backward.op->operands[gradient].shape;
            for (size_t d = 0; d < shape.size(); d++)
                if (shape[d].is_letter() && static_cast<size_t>(shape[d].symbol) == dimension)
                    return keep_number({*find(arguments, name_of(b.source)),
                                        static_cast<int64_t>(d) - static_cast<int64_t>(shape.size())});
        }
        const std::string& letter = backward.op->dimensions[dimension].name;
        if (const Index argument = find(arguments, letter)) return keep_number({*argument, 0});
        for (size_t a = 0; a < form.leading.size(); a++) {
            const std::vector<Dimension>& shape = form.op->operands[form.leading[a]].shape;
            for (size_t d = 0; d < shape.size(); d++)
                if (shape[d].symbol >= 0 && form.op->dimensions[shape[d].symbol].name == letter)
                    return keep_number({a, static_cast<int64_t>(d) - static_cast<int64_t>(shape.size())});
        }
        fail(form.op->name, ": the size ", letter, " of its derivative is not known");
    }

    Source keep_tensor(size_t index) {
        const auto at = std::find(tensors.begin(), tensors.end(), index);
        const size_t place = static_cast<size_t>(at - tensors.begin());
        if (at == tensors.end()) tensors.push_back(index);
        return {Source::tensor, place};
    }

    Source keep_number(Number number) {
        numbers.push_back(number);
        return {Source::number, numbers.size() - 1};
    }

    static bool is_needed(const Step& step, const std::vector<bool>& wanted) {
        return std::any_of(step.gives.begin(), step.gives.end(),
                           [&](const Index& argument) { return argument && wanted[*argument]; });
    }

    void run(const Step& step, const std::vector<c10::IValue>& kept, const variable_list& given,
             const variable_list& saved, const std::vector<bool>& wanted, variable_list& found) const {
        if (!is_needed(step, wanted)) return;
        Stack stack;
        stack.reserve(step.arguments.size());
        for (const Source& s : step.arguments) {
            if (s.kind == Source::tensor && saved[s.index].defined())
                stack.emplace_back(saved[s.index]);
            else if (s.kind == Source::number)
                stack.push_back(kept[s.index]);
            else if (s.kind == Source::gradient && given[s.index].defined())
                stack.emplace_back(given[s.index]);
            else if (s.kind == Source::found)
                stack.emplace_back(found[s.index]);
            else if (s.nullable)
                stack.emplace_back();
            else  // no gradient for this result; the other result has its shape
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
    static variable_list forward(AutogradContext* ctx, const Gradients* d, at::TensorList /*given*/,
                                 int64_t present, const c10::OperatorHandle* op, c10::DispatchKeySet below,
                                 Stack* stack) {
        Gradients::Kept kept = d->keep(stack->data() + (stack->size() - d->arguments.size()), present);
        {
            const at::AutoDispatchBelowADInplaceOrView guard;
            op->redispatchBoxed(below, stack);
        }
        variable_list results;
        results.reserve(d->results.size());
        for (const c10::IValue& v : torch::jit::last(*stack, d->results.size()))
            results.push_back(v.toTensor());
        torch::jit::drop(*stack, d->results.size());
        d->save(*ctx, std::move(kept), results);
        return results;
    }

    // By forward's parameters behind ctx, of which `given` counts as its tensors.
    static variable_list backward(AutogradContext* ctx, const variable_list& given) {
        const std::vector<c10::IValue> kept = ctx->saved_data[saved_numbers].toTupleRef().elements().vec();
        const auto* d = reinterpret_cast<const Gradients*>(kept[kept.size() - 2].toInt());
        const int64_t present = kept.back().toInt();
        std::vector<bool> wanted(d->form.leading.size());
        size_t edge = 0;
        for (size_t a = 0; a < wanted.size(); a++)
            if (present >> a & 1) wanted[a] = ctx->needs_input_grad(edge++);
        variable_list found = d->gradients(*ctx, kept, given, wanted);
        variable_list all(1);
        all.reserve(wanted.size() + 5);
        for (size_t a = 0; a < wanted.size(); a++)
            if (present >> a & 1) all.push_back(std::move(found[a]));
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

    // Whether one of them asks for a gradient. Refuses forward derivatives, which would be dropped without a word.
    bool want_gradients(const c10::OperatorHandle& op) const {
        bool wanted = false;
        for (size_t a = 0; a < known.size(); a++) {
            if (!has_history(a)) continue;
            const at::Tensor& t = given[a].toTensor();
            TORCH_CHECK_NOT_IMPLEMENTED(!t._fw_grad(0).defined(), name_of(op),
                                        " has no forward derivative, which ", known[a].name(), " asks for");
            wanted |= t.requires_grad();
        }
        return wanted;
    }

    bool wants_gradient(size_t a) const { return has_history(a) && given[a].toTensor().requires_grad(); }

  private:
    // Without, a tensor has no derivative of any kind.
    bool has_history(size_t a) const {
        return given[a].isTensor() && given[a].unsafeToTensorImpl()->autograd_meta();
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

// As PyTorch's fallback for such operations, which costs the host half a microsecond even without gradients.
struct Underivable final : c10::OperatorKernel {
    void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
        const CallArguments arguments(op, *stack);
        const bool wanted = arguments.want_gradients(op) && at::GradMode::is_enabled();
        const size_t results = op.schema().returns().size();
        variable_list wanting;
        for (size_t a = 0; wanted && a < arguments.known.size(); a++) {
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
    const Gradients* derivative;
    explicit Autograd(const Gradients* d) : derivative(d) {}

    void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
        const CallArguments arguments(op, *stack);
        const bool wanted = arguments.want_gradients(op);
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
    static std::deque<Gradients> derivatives;  // for good: graphs hold their addresses
    Gradients derivative(form);
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
