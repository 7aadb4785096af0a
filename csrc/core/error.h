// Two kinds of wrong. Bad input: fail("...") throws Error, main() prints its one line and returns 2.
// Our own mistakes: CHECK(expr) prints the expression and where it stands, and aborts.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>

namespace llamac {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// fail("config.json: hidden_size is ", found, ", expected a positive number"): what, where, expected, found.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Error(text.str());
}

inline void check(bool holds, const char* expression, const char* file, int line) {
    if (holds) return;
    std::fprintf(stderr, "llamac: CHECK(%s) failed at %s:%d\n", expression, file, line);
    std::abort();
}
// The runtime's calls have an overload of their own (platform/hip.h).
#define CHECK(expression) ::llamac::check((expression), #expression, __FILE__, __LINE__)

}  // namespace llamac
