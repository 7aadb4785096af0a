#include "core/registry.h"

#include <algorithm>

#include "core/words.h"
#include "platform/cpu_level.h"

namespace llamac {
namespace {

std::vector<Operation*>& table() {
    static std::vector<Operation*> t;  // constructed on first use: registration runs before main()
    return t;
}

}  // namespace

const std::vector<Operation*>& operations() {
    static const bool started = (start_cpu_level(), true);  // tried again where it throws
    static_cast<void>(started);
    return table();
}

Operation& find_operation(std::string_view name) {
    for (Operation* op : operations())
        if (op->name == name) return *op;
    std::vector<std::string> known;
    for (const Operation* op : operations()) known.push_back(op->name);
    fail("no operation is called ", name, suggestion(std::string(name), known),
         "; --list-kernels lists them");
}

void register_operation(Operation& operation) {
    auto& all = table();
    all.insert(std::upper_bound(all.begin(), all.end(), &operation,
                                [](const Operation* a, const Operation* b) { return a->name < b->name; }),
               &operation);
}

void check_derivative(const Description& op, const Derivative& d) {
    const Operation& other = find_operation(d.operation);
    const auto check = [&](const Derivative::Binding& b, bool output) {
        const int i = other.find_operand(b.operand);
        if (i < 0 || other.operands[i].output != output)
            fail(op.name, ": derivative ", d.operation, ": ", b.operand, " is no ",
                 output ? "output" : "input", " of it");
    };
    for (const Derivative::Binding& b : d.gives) check(b, true);
    for (const Derivative::Binding& b : d.takes) check(b, false);
    for (const Operand& o : other.operands) {
        const auto& given = o.output ? d.gives : d.takes;
        const bool bound = std::any_of(given.begin(), given.end(),
                                       [&](const Derivative::Binding& b) { return b.operand == o.name; });
        if (!bound && !o.nullable) fail(op.name, ": derivative ", d.operation, ": ", o.name, " is left out");
    }
    for (size_t s = 0; s < other.scalars.size(); s++) {
        const auto is_flag = [&](const Operand& o) { return o.adds_if == static_cast<int>(s); };
        const bool passed = std::any_of(d.scalars.begin(), d.scalars.end(), [&](int own) {
            return op.scalars[own].name == other.scalars[s].name;
        });
        if (!passed && std::none_of(other.operands.begin(), other.operands.end(), is_flag))
            fail(op.name, ": derivative ", d.operation, ": the scalar ", other.scalars[s].name,
                 " is left out");
    }
}

void check_derivatives() {
    for (const Operation* op : operations())
        for (const Derivative& d : op->derivatives) check_derivative(*op, d);
}

}  // namespace llamac
