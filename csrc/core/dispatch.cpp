#include "core/dispatch.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "core/device_memory.h"
#include "core/observer.h"
#include "core/registry.h"
#include "core/words.h"
#include "platform/ranges.h"

namespace llamac {
namespace {

// Binds the letter of dimension d to a size, or compares.
void bind_dimension(const Operation& op, const Operand& o, const Tensor& t, int d, int64_t* size) {
    const auto found = [&] { return shape_text(t.shape, t.rank); };  // a call pays for no text
    const Dimension& dim = o.shape[d];
    const int64_t scaled = t.shape[d] * dim.divisor;
    int64_t expected = dim.factor;
    if (dim.symbol >= 0) {
        if (size[dim.symbol] < 0 && scaled % dim.factor)
            fail(op.name, ": ", o.name, " has shape ", found(), ", expected ", dimension_text(op, o),
                 " with dimension ", d, " a multiple of ", dim.factor);
        if (size[dim.symbol] < 0) size[dim.symbol] = scaled / dim.factor;
        expected *= size[dim.symbol];
        if (expected % dim.divisor)
            fail(op.name, ": ", op.dimensions[dim.symbol].name, " = ", size[dim.symbol],
                 ", expected a multiple of ", dim.divisor);
    }
    if (scaled != expected)
        fail(op.name, ": ", o.name, " has shape ", found(), ", expected ", dimension_text(op, o),
             " with dimension ", d, " = ", expected / dim.divisor);
}

void bind_shape(const Operation& op, const Operand& o, const Tensor& t, int64_t* size) {
    if (t.rank != static_cast<int>(o.shape.size()))
        fail(op.name, ": ", o.name, " has shape ", shape_text(t.shape, t.rank), ", expected ",
             dimension_text(op, o));
    for (int d = 0; d < t.rank; d++) {
        const Dimension& dim = o.shape[d];
        if (dim.is_letter()) {  // nearly all are: no divisions
            if (size[dim.symbol] < 0) size[dim.symbol] = t.shape[d];
            if (size[dim.symbol] == t.shape[d]) continue;
        }
        bind_dimension(op, o, t, d, size);
    }
}

void check_strides(const Operation& op, const Operand& o, const Tensor& t) {
    if (!o.strided && !t.contiguous()) fail(op.name, ": ", o.name, " must be contiguous");
    if (o.strided && t.rank > 1 && t.shape[t.rank - 1] > 1 && t.stride[t.rank - 1] != 1)
        fail(op.name, ": ", o.name, " must have stride 1 in its last dimension");
}

// Whether it has elements.
bool check_operand(const Operation& op, const Operand& o, const Tensor& t, int64_t* size, Types& types) {
    const bool has_elements = t.elements() != 0;
    if (!t.data && has_elements) {
        if (!o.nullable) fail(op.name, ": ", o.name, " is missing");
        return true;
    }
    types.check(o, t.dtype);
    bind_shape(op, o, t, size);
    if (has_elements) check_strides(op, o, t);
    return has_elements;
}

bool takes(const Instantiation& e, const Operation& op, const Tensor* tensors) {
    for (size_t i = 0; i < op.operands.size(); i++)
        if (tensors[i].data && tensors[i].dtype != e.operands[i].dtype) return false;
    return true;
}

// Naive kernels have a thread for each element, in one dimension of the grid.
bool fits_a_grid(const Variant& v, const Call& call) {
    if (v.backend() == Backend::host || std::strcmp(v.name, "naive") != 0) return true;
    return std::all_of(call.tensor, call.tensor + call.op->operands.size(), [](const Tensor& t) {
        return !t.data || t.elements() < device_properties().grid_threads - 1024;  // a block's, to round up
    });
}

const Instantiation* instantiation_for(const Variant& v, const Call& call) {
    if (!v.supports(call) || !fits_a_grid(v, call)) return nullptr;
    for (const Instantiation& e : v.instantiations)
        if (takes(e, *call.op, call.tensor)) return &e;
    return nullptr;
}

struct Choice {
    const Variant* variant;
    const Instantiation* entry;
};
constexpr const char* optimized = "optimized";  // the name of the default variants

// The variants that a call tries in turn if nothing else is chosen.
std::vector<const Variant*> default_variants(const Operation& op, Backend backend) {
    std::vector<const Variant*> variants;
    for (const Variant& v : op.variants)
        if (v.backend() == backend) variants.push_back(&v);
    return variants;
}

std::vector<const Variant*> variants_called(const Operation& op, const std::string& name, Backend backend) {
    if (name == optimized) return default_variants(op, backend);
    std::string known = optimized;
    for (const Variant& v : op.variants) {
        if (name == v.name) return {&v};
        known += std::string(", ") + v.name;
    }
    fail(op.name, ": no variant ", name, ", expected one of ", known);
}

// The first of them that supports the call; each has to be at home where the operands are, or the device emulated.
Choice choose_among(const Operation& op, const Call& call, Backend backend,
                    std::span<const Variant* const> candidates) {
    std::string names;
    for (const Variant* v : candidates)
        if (v->backend() != backend && !device_properties().emulated)
            fail(op.name, ": variant ", v->name, " computes on the ",
                 backend == Backend::host ? "device, the call's operands are the host's"
                                          : "host, the call's operands are the device's");
    for (const Variant* v : candidates)
        if (const Instantiation* entry = instantiation_for(*v, call)) return {v, entry};
    for (const Variant* v : candidates) names += std::string(names.empty() ? "" : ", ") + v->name;
    fail(op.name, ": variant ", names, " does not take these shapes, types or strides");
}

// variant: its name; null: one of the context's choices, else of the defaults.
Choice choose(const Operation& op, const Call& call, const Context& context, const char* variant) {
    if (variant)
        return choose_among(op, call, context.backend, variants_called(op, variant, context.backend));
    if (const auto* chosen = context.kernels ? context.kernels->of(op) : nullptr)
        return choose_among(op, call, context.backend, *chosen);
    for (const Variant& v : op.variants)
        if (v.backend() == context.backend)
            if (const Instantiation* entry = instantiation_for(v, call)) return {&v, entry};
    fail(op.name, ": no variant takes these shapes, types or strides");
}

// The scalars of a call that leaves out the last ones.
std::vector<Scalar> complete(const Operation& op, std::span<const Scalar> given) {
    const size_t count = op.scalars.size();
    std::vector<Scalar> all(given.begin(), given.end());
    while (all.size() < count) {
        const std::optional<double>& value = op.scalars[all.size()].missing;
        if (!value) break;
        all.push_back(*value);
    }
    if (all.size() != count) fail(op.name, ": expected ", count, " scalars, found ", given.size());
    return all;
}

// with(OPERAND). A tensor without elements may have no memory.
void check_company(const Operation& op, std::span<const Tensor> tensors) {
    const auto is_given = [&](size_t i) { return tensors[i].data || tensors[i].elements() == 0; };
    for (size_t i = 0; i < tensors.size(); i++) {
        const int with = op.operands[i].with;
        if (with < 0 || is_given(i) == is_given(static_cast<size_t>(with))) continue;
        const std::string &own = op.operands[i].name, &other = op.operands[static_cast<size_t>(with)].name;
        fail(op.name, ": ", is_given(i) ? other : own, " is missing, expected with ",
             is_given(i) ? own : other);
    }
}

// multiple(NH, NKV) and the like.
void check_multiples(const Operation& op, const int64_t* size) {
    for (size_t d = 0; d < op.dimensions.size(); d++) {
        const int of = op.dimensions[d].multiple_of;
        if (of >= 0 && size[of] > 0 && size[d] % size[of])
            fail(op.name, ": ", op.dimensions[d].name, " = ", size[d], ", expected a multiple of ",
                 op.dimensions[of].name, " = ", size[of]);
    }
}

// at_most(T, S, causal) and the like.
void check_limits(const Operation& op, std::span<const Scalar> scalars, const int64_t* size) {
    for (size_t d = 0; d < op.dimensions.size(); d++) {
        const DimensionInfo& limited = op.dimensions[d];
        if (limited.at_most < 0 || !scalars[limited.at_most_if].integer) continue;
        if (size[d] > size[limited.at_most])
            fail(op.name, ": ", limited.name, " = ", size[d], ", expected at most ",
                 op.dimensions[limited.at_most].name, " = ", size[limited.at_most], " where ",
                 op.scalars[limited.at_most_if].name);
    }
}

// A call without rows launches nothing; it writes sums and means over zero elements.
void run_empty(const Call& call) {
    const Operation& op = *call.op;
    for (size_t d = 0; d < op.dimensions.size(); d++) {
        if (call.size[d] == 0 && !op.dimensions[d].may_be_zero)
            fail(op.name, ": ", op.dimensions[d].name, " = 0, expected at least 1");
    }
    for (int i = 0; i < op.outputs && !call.launch.caller.dry_run; i++) {
        const Operand& o = op.operands[i];
        const Tensor& t = call.tensor[i];
        if (!t.data || t.elements() == 0 || o.in_place || call.adds(o)) continue;
        CHECK(t.contiguous());
        const size_t bytes = static_cast<size_t>(t.bytes());
        const int byte = o.mean ? 0xff : 0;  // all bits set are a NaN
        if (call.launch.caller.backend == Backend::host)
            std::memset(t.data, byte, bytes);
        else
            CHECK(hipMemsetAsync(t.data, byte, bytes, call.launch.stream));
    }
}

// Threads a block and workspace of a device variant. own: for a call whose context has none.
void prepare_launch(Call& call, const Variant& v, int threads, std::optional<Workspace>& own) {
    if (v.backend() == Backend::host) return;
    call.launch.threads = threads ? threads : v.threads.empty() ? 256 : v.threads.front();
    call.launch.caller.backend = Backend::device;
    if (!call.launch.caller.workspace) call.launch.caller.workspace = &own.emplace();
    if (!v.workspace) return;
    Workspace& workspace = *call.launch.caller.workspace;
    const int64_t bytes = v.workspace(call);
    workspace.asked = std::max(workspace.asked, bytes);
    if (!call.launch.caller.dry_run) call.launch.workspace = workspace.reserve(bytes);
}

}  // namespace

KernelChoices::KernelChoices(const std::vector<std::string>& choices) {
    for (const std::string& choice : choices) {
        const size_t equals = choice.find('=');
        if (equals == std::string::npos || equals + 1 == choice.size())
            fail("--kernel ", choice, ": expected OPERATION=VARIANT[,VARIANT...]");
        const Operation& op = find_operation(choice.substr(0, equals));
        std::vector<const Variant*>& variants = chosen[&op];
        variants.clear();
        for (const std::string& name : split_list(choice.substr(equals + 1)))
            for (const Variant* v : variants_called(op, name, computing_context().backend))
                if (std::find(variants.begin(), variants.end(), v) == variants.end()) variants.push_back(v);
    }
}

const std::vector<const Variant*>* KernelChoices::of(const Operation& op) const {
    const auto found = chosen.empty() ? chosen.end() : chosen.find(&op);
    return found == chosen.end() ? nullptr : &found->second;
}

const Variant* first_choice(const Operation& op) {
    const std::vector<const Variant*> all = default_variants(op, computing_backend());
    return all.empty() ? nullptr : all.front();
}

bool takes(const Variant& variant, const Call& call) {
    return variant.backend() == call.launch.caller.backend && instantiation_for(variant, call);
}

void run(const Operation& op, std::span<const Tensor> tensors, std::span<const Scalar> scalars,
         const Context& context, const char* variant, int threads) {
    if (tensors.size() != op.operands.size())
        fail(op.name, ": expected ", op.operands.size(), " tensors, found ", tensors.size());
    if (scalars.size() != op.scalars.size())
        return run(op, tensors, complete(op, scalars), context, variant, threads);
    int64_t size[Description::max_dimensions];
    std::fill_n(size, op.dimensions.size(), -1);
    Types types(op);
    bool is_empty = false;
    for (size_t k = 0; k < tensors.size(); k++) {
        const size_t i = op.in_order(k);
        is_empty |= !check_operand(op, op.operands[i], tensors[i], size, types);
    }
    check_company(op, tensors);
    check_multiples(op, size);
    check_limits(op, scalars, size);
    Call call{&op, tensors.data(), scalars.data(), size, {context.stream, 0, nullptr, context}};
    if (is_empty) return run_empty(call);
    const Choice chosen = choose(op, call, context, variant);
    std::optional<Workspace> own;
    prepare_launch(call, *chosen.variant, threads, own);
    if (context.dry_run) {
        if (context.observer && context.observer->planned) context.observer->planned(call);
        return;
    }
    const Range range(op.name.c_str());
    if (context.observer) context.observer->before(context.stream);
    chosen.entry->launch(call);
    if (context.observer) context.observer->after_run(call, *chosen.variant);
}

}  // namespace llamac
