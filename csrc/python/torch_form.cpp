#include "torch_form.h"

#include <algorithm>
#include <cctype>

namespace llamac {

static std::string joined(const std::vector<std::string>& items) {
    std::string text;
    for (const std::string& item : items) text += (text.empty() ? "" : ", ") + item;
    return text;
}

// Whether the first form returns it: an optional output that grows with the inputs would cost callers that ignore it.
static bool is_given(const Operand& o) {
    const auto grows = [](const Dimension& d) { return d.symbol >= 0; };
    return !o.nullable || std::none_of(o.shape.begin(), o.shape.end(), grows);
}

Form::Form(const Operation& op_, bool out_) : op(&op_), out(out_) {
    for (size_t i = 0; i < op->operands.size(); i++) {
        const Operand& o = op->operands[i];
        if (!o.output || o.in_place)
            leading.push_back(i);
        else if (out)
            last.push_back(i);
        else if (is_given(o))
            results.push_back(i);
    }
    find_sizes();
    const auto decides = [&](size_t s) {
        return std::any_of(op->operands.begin(), op->operands.end(),
                           [&](const Operand& o) { return o.adds_if == static_cast<int>(s); });
    };
    for (size_t i = 0; i < op->scalars.size(); i++)
        if (out || !decides(i)) scalars.push_back(i);
    arguments = leading.size() + sizes.size() + scalars.size() + last.size();
    for (const size_t i : results) fresh |= uint32_t{1} << i;
}

void Form::find_sizes() {
    std::vector<bool> told(op->dimensions.size());
    const auto each = [&](const std::vector<size_t>& operands, auto visit) {
        for (const size_t i : operands)
            for (const Dimension& d : op->operands[i].shape)
                if (d.symbol >= 0) visit(op->operands[i], static_cast<size_t>(d.symbol));
    };
    each(leading, [&](const Operand& o, size_t d) { told[d] = told[d] || !o.nullable; });
    each(results, [&](const Operand&, size_t d) {
        if (told[d]) return;
        told[d] = true;
        sizes.push_back(d);
    });
}

std::string Form::schema() const {
    std::vector<std::string> arguments, returned;
    char alias = 'a';
    const auto add = [&](size_t i) {
        const Operand& o = op->operands[i];
        std::string type = "Tensor";
        if (o.output) type += std::string("(") + alias++ + "!)";
        arguments.push_back(type + (o.nullable ? "? " : " ") + o.name);
    };
    for (const size_t i : leading) add(i);
    for (const size_t d : sizes) arguments.push_back("SymInt " + op->dimensions[d].name);
    for (const size_t i : scalars) {
        const char kind = op->scalars[i].kind;
        std::string missing = missing_text(op->scalars[i]);
        if (missing == "true" || missing == "false")
            missing[0] = static_cast<char>(std::toupper(missing[0]));  // Python's
        arguments.push_back((kind == 'f'   ? "float "
                             : kind == 'i' ? "int "
                                           : "bool ") +
                            op->scalars[i].name + (missing.empty() ? "" : "=" + missing));
    }
    if (!last.empty()) arguments.push_back("*");
    for (const size_t i : last) add(i);
    for (const size_t i : results) returned.push_back("Tensor " + op->operands[i].name);
    return name() + "(" + joined(arguments) + ") -> (" + joined(returned) + ")";
}

}  // namespace llamac
