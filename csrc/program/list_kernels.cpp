#include "program/list_kernels.h"

#include <cstdio>
#include <string>

#include "core/registry.h"

namespace llamac {
namespace {

// The words in lines of at most `width` characters, each but the first after `indent` blanks.
std::string wrapped(const std::string& words, size_t indent, size_t width) {
    std::string text;
    size_t column = 0;
    for (size_t begin = 0; begin < words.size();) {
        const size_t end = std::min(words.find(' ', begin), words.size());
        const size_t length = end - begin;
        if (column && column + 1 + length > width) text += "\n" + std::string(indent, ' '), column = 0;
        if (column) text += " ", column++;
        text += words.substr(begin, length);
        column += length;
        begin = end + 1;
    }
    return text;
}

}  // namespace

void list_kernels() {
    constexpr int columns[] = {14, 14, 15}, indent = 2;
    constexpr size_t width = 100, start = indent + columns[0] + columns[1] + columns[2];
    const auto print = [&](const char* name, const char* device, const char* same, const std::string& words) {
        std::printf("%*s%-*s%-*s%-*s%s\n", indent, "", columns[0], name, columns[1], device, columns[2], same,
                    wrapped(words, start, width - start).c_str());
    };
    print("variant", "runs on", "deterministic", "idea; limits");
    for (const Operation* op : operations()) {
        std::printf("%s\n", wrapped(op->name + ": " + op->summary, 2 * indent, width).c_str());
        for (const Variant& v : op->variants)
            print(v.name,
                  v.backend() == Backend::host ? "host"
                  : *v.chip                    ? v.chip
                                               : "device",
                  v.deterministic ? "yes" : "no",
                  v.idea + std::string(*v.supports.words ? "; takes " : "") + v.supports.words);
    }
}

}  // namespace llamac
