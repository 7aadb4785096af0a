// ops/operations.h declares the typed call of every operation. This program writes it from the registry (--write) or
// compares it, and shows what such a call refuses.
//
//   check_declarations csrc/ops/operations.h [--write]
#include <cctype>
#include <cstring>

#include "check.h"
#include "ops/operations.h"

using namespace llamac;

namespace {

// "rmsnorm_forward" -> "RmsnormForwardCall"
std::string type_of(const Operation& op) {
    std::string type;
    bool upper = true;
    for (const char c : op.name) {
        if (c != '_') type += static_cast<char>(upper ? std::toupper(c) : c);
        upper = c == '_';
    }
    return type + "Call";
}

std::string comment_of(const Operation& op, const Operand& o) {
    return type_text(op, o) + dimension_text(op, o);
}

std::string list(const std::vector<std::string>& names) {
    std::string text;
    for (const std::string& n : names) text += (text.empty() ? "call." : ", call.") + n;
    return text;
}

// The members of a call: a line for neighbours of one type and shape.
struct Members {
    std::string text, type, comment;

    void add(const std::string& its_type, const std::string& name, const std::string& its_comment) {
        if (its_type == type && its_comment == comment) {
            text += ", " + name;
            return;
        }
        end();
        type = its_type, comment = its_comment;
        text += "    " + type + " " + name;
    }
    void end() {
        if (!type.empty()) text += ";" + comment + "\n";
    }
};

std::string declare(const Operation& op) {
    const std::string type = type_of(op);
    Members members;
    std::vector<std::string> operands, scalars;
    for (const Operand& o : op.operands) {
        members.add(o.nullable ? "Tensor" : "Required", o.name + (o.nullable ? " = {}" : ""),
                    "  // " + comment_of(op, o));
        operands.push_back(o.name);
    }
    for (const ScalarInfo& s : op.scalars) {
        members.add(s.kind == 'f'   ? "Real"
                    : s.kind == 'i' ? "Integer"
                                    : "Flag",
                    s.name + (s.missing ? " = " + missing_text(s) : ""), "");
        scalars.push_back(s.name);
    }
    members.end();
    std::string text = "\n// " + std::string(op.summary) + "\nstruct " + type + " {\n" + members.text;
    text += "};\ninline void " + op.name + "(const Context& context, const " + type + "& call) {\n";
    text += "    run_by_name<\"" + op.name + "\">(context, {" + list(operands) + "}, {" + list(scalars) +
            "});\n}\n";
    return text;
}

std::string declarations() {
    std::string text =
        "// The typed call of every operation. Written from the descriptions by `check_declarations "
        "--write`; not to be\n"
        "// edited. docs/operations.md explains types and shapes.\n"
        "// clang-format off\n"
        "#pragma once\n"
        "#include \"core/typed_call.h\"\n\n"
        "namespace llamac {\n";
    for (const Operation* op : operations()) text += declare(*op);
    return text + "\n}  // namespace llamac\n";
}

std::string path;

TEST(check_file) {
    check(
        get(path) == declarations(),
        path + ": is not what the descriptions say; write it anew: check_declarations " + path + " --write");
}

template <class Call>
concept complete = requires(Tensor t) { Call{.out = t, .rstd = t, .x = t, .weight = t, .eps = 1e-5}; };
template <class Call>
concept without_output = requires(Tensor t) { Call{.out = t, .x = t, .weight = t, .eps = 1e-5}; };
template <class Call>
concept without_input = requires(Tensor t) { Call{.out = t, .rstd = t, .x = t, .eps = 1e-5}; };
template <class Call>
concept without_scalar = requires(Tensor t) { Call{.out = t, .rstd = t, .x = t, .weight = t}; };
template <class Call>
concept with_another =
    requires(Tensor t) { Call{.out = t, .rstd = t, .y = t, .x = t, .weight = t, .eps = 1e-5}; };
static_assert(complete<RmsnormForwardCall>);
static_assert(!without_output<RmsnormForwardCall> && !without_input<RmsnormForwardCall>);
static_assert(!without_scalar<RmsnormForwardCall> && !with_another<RmsnormForwardCall>);
template <class Call, class Value>
concept takes_flag = requires(Tensor t, Value v) { Call{.squares = t, .x = t, .accumulate = v}; };
static_assert(takes_flag<GlobalNormCall, bool> && !takes_flag<GlobalNormCall, double>);
template <class Call>
concept without_nullable = requires(Tensor t) { Call{.out = t, .x = t, .weight = t}; };
static_assert(without_nullable<MatmulForwardCall>);

// Without guard, scale and offset.
template <class Call>
concept without_the_last =
    requires(Tensor t) { Call{t, {}, t, t, t, t, t, t, {}, {}, 0., 0., 0., 0., 0., 1, 0}; };
static_assert(without_the_last<AdamwCall>);

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: check_declarations csrc/ops/operations.h [--write]\n");
        return 2;
    }
    path = argv[1];
    if (argc > 2 && std::strcmp(argv[2], "--write") == 0) {
        std::ofstream(path, std::ios::binary | std::ios::trunc) << declarations();
        return 0;
    }
    return run_checks(1, argv);
}
