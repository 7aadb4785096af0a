// The registry for device.py: its device variants, a call of one variant on device operands, and the cases of check.py.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/registry.h"
#include "operation_check.h"

using namespace llamac;

// A line for each device variant: operation and name.
extern "C" void describe_operations(char* out, size_t size) {
    std::string text;
    for (const Operation* op : operations())
        for (const Variant& v : op->variants) {
            if (v.backend() != Backend::device) continue;
            text += op->name + " " + v.name + "\n";
        }
    CHECK(text.size() < size);
    std::snprintf(out, size, "%s", text.c_str());
}

// shape, stride: four numbers for each operand. Returns 0, or 1 with the message in error[1000].
extern "C" int call_operation(const char* name, const char* variant, int operands, void** data,
                              const int* dtype, const int* rank, const int64_t* shape, const int64_t* stride,
                              int scalars, const double* real, const int64_t* integer, char* error) {
    try {
        std::vector<Tensor> tensors(static_cast<size_t>(operands));
        for (int i = 0; i < operands; i++) {
            Tensor& t = tensors[static_cast<size_t>(i)];
            t.data = data[i], t.dtype = static_cast<DType>(dtype[i]), t.rank = rank[i];
            for (int d = 0; d < 4; d++) t.shape[d] = shape[4 * i + d], t.stride[d] = stride[4 * i + d];
        }
        std::vector<Scalar> values;
        for (int i = 0; i < scalars; i++) {
            Scalar value(real[i]);
            value.integer = integer[i];
            values.push_back(value);
        }
        Context context;
        context.backend = Backend::device;
        run(find_operation(name), tensors, values, context, variant);
        return 0;
    } catch (const std::exception& e) {
        std::snprintf(error, 1000, "%s", e.what());
        return 1;
    }
}

namespace {

// What check.py does for a case.
struct Checker {
    void (*order)(int);  // of the waves in the launches that follow; -1: they are noted, and not executed
    int (*choose)();     // whether the case whose launches were noted is to run
    void (*report)(const char* shape, const char* wrong, double share);
};

// Empty, or what is wrong. share: of the tolerance.
std::string check_case(Case& c, const Variant& v, int orders, const Checker& checker, double& share) {
    c.values.clear();
    fill_values(c);
    const Truth truth = truth_of(c);
    std::vector<std::vector<uint8_t>> first;
    for (int i = 0; i < orders; i++) {
        checker.order(i);
        const Run run = run_variant(c, v, 1);
        if (!run.wrong.empty()) return run.wrong;
        if (i && run.bits != first) return "the bits depend on the order of the waves";
        if (const std::string wrong = compare(c, run, truth, share); !wrong.empty()) return wrong;
        if (!i) first = run.bits;
    }
    return "";
}

// Whether the variant takes the case; its launches are noted.
bool note_launches(Case& c, const Variant& v, const Checker& checker) {
    for (size_t i = 0; i < c.op->operands.size(); i++)
        c.values.emplace_back(shape_of(c, i, c.entry->operands[i].dtype).elements());
    checker.order(-1);
    return run_variant(c, v, 1).supported;
}

}  // namespace

// Cases of one variant: the shapes of check_operations, the purposely chosen ones first, with the combinations of flags,
// absent operands and strides in turn. What is chosen runs, and each combination of check_operations --brief once.
extern "C" void check_variant(const char* operation, const char* variant, int orders, void (*order)(int),
                              int (*choose)(), void (*report)(const char*, const char*, double)) {
    const Checker checker{order, choose, report};
    const Operation& op = find_operation(operation);
    const Variant& v = *std::find_if(op.variants.begin(), op.variants.end(),
                                     [&](const Variant& each) { return each.name == std::string(variant); });
    const std::vector<Combination> all = combinations(op, false);
    std::vector<Combination> to_run = combinations(op, true);
    for (const Instantiation& entry : v.instantiations)
        for (size_t turn = 0; turn < all.size(); turn++)
            for (int number = shape_count(op) - 1; number >= 0; number--) {
                const Combination& k = all[(turn + static_cast<size_t>(number)) % all.size()];
                const std::vector<int64_t> sizes = test_sizes(op, number);
                const int chosen = number - shapes_an_entry;
                if (sizes.empty() || (chosen >= 0 && further(op)[static_cast<size_t>(chosen) / 2]->large))
                    continue;
                Case c = make_case(op, entry, sizes, number, k.strided, k.flags, k.absent);
                if (!holds_limits(c)) continue;
                double share = 0;
                std::string wrong;
                try {
                    if (!note_launches(c, v, checker) || !(choose() + std::erase(to_run, k))) continue;
                    wrong = check_case(c, v, orders, checker, share);
                } catch (const std::exception& e) {
                    wrong = e.what();
                }
                report((describe_values(c) + (c.strided ? " strided" : "")).c_str(), wrong.c_str(), share);
            }
}
