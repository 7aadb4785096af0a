#include "program/list_kernels.h"

#include <cstdio>

#include "core/dispatch.h"
#include "core/registry.h"
#include "platform/terminal.h"

namespace llamac {

void list_kernels(const std::string& operation) {
    constexpr int columns[] = {14, 14}, indent = 2;
    constexpr size_t start = indent + columns[0] + columns[1];
    const size_t width = terminal_columns(stdout).value_or(default_columns);
    const auto print = [&](char mark, const char* name, const char* device, const std::string& words) {
        std::printf("%-*c%-*s%-*s%s\n", indent, mark, columns[0], name, columns[1], device,
                    wrapped(words, width, start, start).c_str());
    };
    const auto print_operation = [&](const Operation& op) {
        const Variant* first = first_choice(op);
        std::printf("%s\n", wrapped(op.name + ": " + op.summary, width, 2 * indent).c_str());
        for (const Variant& v : op.variants)
            print(&v == first ? '*' : ' ', v.name,
                  v.backend() == Backend::host ? "host"
                  : *v.chip                    ? v.chip
                                               : "device",
                  v.idea + std::string(*v.supports.words ? "; takes " : "") + v.supports.words);
    };
    const Operation* one = operation == "all" ? nullptr : &find_operation(operation);
    std::printf("* is the default; a call that it does not take tries those below it\n");
    print(' ', "variant", "runs on", "idea; limits");
    if (one) return print_operation(*one);
    for (const Operation* op : operations()) print_operation(*op);
}

}  // namespace llamac
