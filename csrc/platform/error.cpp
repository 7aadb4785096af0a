#include "platform/error.h"

#include <cstdio>
#include <cstdlib>

namespace llamac {

std::string one_line(std::string_view text) {
    constexpr size_t most = 5000;  // longer than a path
    std::string line;
    for (const char c : text) {
        const auto code = static_cast<unsigned char>(c);
        char escape[5];
        std::snprintf(escape, sizeof escape, "\\x%02x", code);
        line += code < 0x20 || code == 0x7f ? escape : std::string(1, c);
        if (line.size() > most) return line.substr(0, most) + "...";  // escapes count, as in llamac/errors.py
    }
    return line;
}

static bool failed_checks_raise = false;

void raise_failed_checks() {
    failed_checks_raise = true;
}

void check_failed(const std::string& line) {
    if (failed_checks_raise) throw std::runtime_error("llamac: " + line);
    std::fprintf(stderr, "llamac: %s\n", line.c_str());
    std::abort();
}

}  // namespace llamac
