#include "platform/error.h"

#include <charconv>
#include <cstdio>
#include <cstdlib>

namespace llamac {

namespace {

// Bytes of the control character that a text begins with; 0: it begins with another one.
size_t control_bytes(std::string_view text) {
    const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
    const auto within = [](unsigned value, unsigned low, unsigned high) {
        return low <= value && value <= high;
    };
    if (byte(0) < 0x20 || byte(0) == 0x7f) return 1;
    if (byte(0) == 0xc2) return within(byte(1), 0x80, 0x9f) ? 2 : 0;
    if (byte(0) == 0xd8) return byte(1) == 0x9c ? 2 : 0;  // U+061C
    if (byte(0) != 0xe2) return 0;
    const unsigned last = byte(2);
    if (byte(1) == 0x80)
        return within(last, 0x8e, 0x8f) || within(last, 0xa8, 0xae) ? 3 : 0;  // U+200E, U+2028 ..
    return byte(1) == 0x81 && within(last, 0xa6, 0xa9) ? 3 : 0;               // U+2066 ..
}

std::string escaped(std::string_view text, std::string_view kept, size_t max_size) {
    std::string line;
    for (size_t at = 0; at < text.size();) {
        const size_t bytes = kept.find(text[at]) == kept.npos ? control_bytes(text.substr(at)) : 0;
        if (bytes == 0) line += text[at++];
        for (const size_t end = at + bytes; at < end; at++) {
            char escape[5];
            std::snprintf(escape, sizeof escape, "\\x%02x", static_cast<unsigned char>(text[at]));
            line += escape;
        }
        if (line.size() > max_size)
            return line.substr(0, max_size) + "...";  // escapes count, as in llamac/base/errors.py
    }
    return line;
}

}  // namespace

std::string printable(std::string_view text) {
    return escaped(text, "\n\t", std::string::npos);
}

std::string one_line(std::string_view text) {
    constexpr size_t max_size = 5000;  // longer than a path
    return escaped(text, "", max_size);
}

void fail_with(std::initializer_list<MessagePart> parts) {
    using Kind = MessagePart::Kind;
    std::string text;
    for (const MessagePart& part : parts) {
        if (part.kind == Kind::text) text += part.text;
        if (part.kind == Kind::character) text += part.character;
        if (part.kind == Kind::integer) text += std::to_string(part.integer);
        if (part.kind == Kind::natural) text += std::to_string(part.natural);
        if (part.kind != Kind::real) continue;
        char number[32];  // not printf: a process that Python runs in may have a locale
        const auto [end, error] =
            std::to_chars(number, number + sizeof number, part.real, std::chars_format::general, 6);
        text.append(number, end);
    }
    throw Error(one_line(text));
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

void check_failed(const char* expression, const char* file, int line) {
    check_failed(std::string("CHECK(") + expression + ") failed at " + file + ":" + std::to_string(line));
}

}  // namespace llamac
