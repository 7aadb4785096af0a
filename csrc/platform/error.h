// Two kinds of errors. For bad input, fail("...") throws Error; main() prints its one line and returns 2. For errors
// of the program, CHECK(expr) prints the expression with file and line, and aborts; in a Python process it throws
// (raise_failed_checks).
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace llamac {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The text for a terminal, with "\x1b" for each byte of a character that could move its cursor, change its state or turn
// the direction of the text around: ASCII's control characters but '\n' and '\t', U+0080 to U+009F, and Unicode's marks
// of lines and directions. llamac/base/errors.py has the same; test_readers.py::test_no_control_character_is_shown.
std::string printable(std::string_view text);
// The same for one line: '\n' and '\t' are escaped, too, and long lines are cut.
std::string one_line(std::string_view text);

// fail("config.json: hidden_size is ", found, ", expected a positive number"): what, where, expected, found.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Error(one_line(text.str()));
}

// Prints the line of a failed CHECK or runtime call and aborts, or throws (raise_failed_checks).
[[noreturn]] void check_failed(const std::string& line);
// Failed checks throw std::runtime_error from now on: a host process must survive them.
void raise_failed_checks();

inline void check(bool holds, const char* expression, const char* file, int line) {
    if (!holds)
        check_failed(std::string("CHECK(") + expression + ") failed at " + file + ":" + std::to_string(line));
}
// The runtime's calls have an overload of their own (platform/hip.h).
#define CHECK(expression) ::llamac::check((expression), #expression, __FILE__, __LINE__)

}  // namespace llamac
