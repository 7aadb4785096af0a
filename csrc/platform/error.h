// Two kinds of errors. For bad input, fail("...") throws Error; main() prints its one line and returns 2. For errors
// of the program, CHECK(expr) prints the expression with file and line, and aborts; in a Python process it throws
// (raise_failed_checks).
#pragma once
#include <cstdint>
#include <initializer_list>
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

// A part of a message: text, a character, an integer, or a number as "%g" prints it.
struct MessagePart {
    enum class Kind : uint8_t { text, character, integer, natural, real };
    Kind kind;
    union {
        std::string_view text;
        char character;
        long long integer;
        unsigned long long natural;
        double real;
    };

    MessagePart(const char* v) : kind(Kind::text), text(v) {}
    MessagePart(std::string_view v) : kind(Kind::text), text(v) {}
    MessagePart(const std::string& v) : kind(Kind::text), text(v) {}
    MessagePart(char v) : kind(Kind::character), character(v) {}
    MessagePart(int v) : kind(Kind::integer), integer(v) {}
    MessagePart(long v) : kind(Kind::integer), integer(v) {}
    MessagePart(long long v) : kind(Kind::integer), integer(v) {}
    MessagePart(unsigned v) : kind(Kind::natural), natural(v) {}
    MessagePart(unsigned long v) : kind(Kind::natural), natural(v) {}
    MessagePart(unsigned long long v) : kind(Kind::natural), natural(v) {}
    MessagePart(double v) : kind(Kind::real), real(v) {}
};
[[noreturn]] void fail_with(std::initializer_list<MessagePart> parts);

// fail("config.json: hidden_size is ", found, ", expected a positive number"): what, where, expected, found.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    fail_with({parts...});
}

// Prints the line of a failed CHECK or runtime call and aborts, or throws (raise_failed_checks).
[[noreturn]] void check_failed(const std::string& line);
[[noreturn]] void check_failed(const char* expression, const char* file, int line);
// Failed checks throw std::runtime_error from now on: a host process must survive them.
void raise_failed_checks();

inline void check(bool holds, const char* expression, const char* file, int line) {
    if (!holds) check_failed(expression, file, line);
}
// The runtime's calls have an overload of their own (platform/hip.h).
#define CHECK(expression) ::llamac::check((expression), #expression, __FILE__, __LINE__)

}  // namespace llamac
