#include "train/toml.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "core/error.h"
#include "core/file.h"

namespace llamac {
namespace {

using nlohmann::json;

bool is_digit(char c) {
    return c >= '0' && c <= '9';
}
bool is_bare(char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '-';
}

struct Reader {
    const std::string& path;
    std::string_view text;
    size_t at = 0;
    int line = 1;

    char peek() const { return at < text.size() ? text[at] : '\0'; }
    std::string found() const {
        if (at >= text.size()) return "the end of the file";
        const std::string_view rest = text.substr(at, text.find_first_of("\r\n", at) - at);
        return rest.empty() ? "the end of the line" : quote(rest);
    }
    template <class... Parts>
    [[noreturn]] void refuse(const Parts&... parts) const {
        fail(path, ": line ", line, ": ", parts...);
    }

    // TOML has them nowhere, not in comments either.
    void refuse_control_characters() const {
        for (size_t i = 0; i < text.size(); i++) {
            const unsigned char c = static_cast<unsigned char>(text[i]);
            const bool newline = c == '\n' || (c == '\r' && i + 1 < text.size() && text[i + 1] == '\n');
            if ((c < 0x20 || c == 0x7f) && c != '\t' && !newline)
                fail(path, ": byte ", i, ": expected text, found the control character ", int{c});
        }
    }

    void skip_blanks() {
        while (peek() == ' ' || peek() == '\t') at++;
        if (peek() != '#') return;
        at = std::min(text.find_first_of("\r\n", at), text.size());
    }
    bool skip_newline() {
        if (text.compare(at, 2, "\r\n") == 0) at++;
        if (peek() != '\n') return false;
        at++;
        line++;
        return true;
    }

    std::string read_key();
    json read_value(bool in_array);
    json read_array();
    std::string read_string();
    void read_escape(std::string& out);
    json read_number();
};

std::string Reader::read_key() {
    if (peek() == '[') refuse("expected key = value, found the table ", found());
    if (peek() == '"' || peek() == '\'') return read_string();
    const size_t start = at;
    while (is_bare(peek())) at++;
    if (at == start) refuse("expected key = value, found ", found());
    return std::string(text.substr(start, at - start));
}

json Reader::read_value(bool in_array) {
    const char c = peek();
    if (c == '"' || c == '\'') return read_string();
    if (c == '[' && !in_array) return read_array();
    if (c == '+' || c == '-' || is_digit(c)) return read_number();
    for (const bool value : {true, false}) {
        const std::string_view word = value ? "true" : "false";
        if (text.compare(at, word.size(), word) != 0) continue;
        at += word.size();
        return value;
    }
    refuse("expected a string in quotes, a number, true", in_array ? " or false" : ", false or an array",
           ", found ", found());
}

json Reader::read_array() {
    json array = json::array();
    const auto skip = [this] {
        do skip_blanks();
        while (skip_newline());
    };
    at++;
    for (skip(); peek() != ']'; skip()) {
        array.push_back(read_value(true));
        skip();
        if (peek() == ',')
            at++;
        else if (peek() != ']')
            refuse("expected , or ] in an array, found ", found());
    }
    at++;
    return array;
}

// "..." with escapes, '...' without.
std::string Reader::read_string() {
    const char delimiter = text[at];
    if (text.compare(at, 3, std::string(3, delimiter)) == 0)
        refuse("expected a string on one line, found ", found());
    std::string out;
    for (at++; peek() != delimiter;) {
        if (at >= text.size() || peek() == '\r' || peek() == '\n')
            refuse("expected ", delimiter, " at the end of a string, found ", found());
        if (peek() == '\\' && delimiter == '"')
            read_escape(out);
        else
            out += text[at++];
    }
    at++;
    return out;
}

void Reader::read_escape(std::string& out) {
    const std::string_view names = "btnfr\"\\", bytes = "\b\t\n\f\r\"\\";
    const char name = at + 1 < text.size() ? text[at + 1] : '\0';
    const size_t known = names.find(name);
    if (name != '\0' && known != names.npos) {
        out += bytes[known];
        at += 2;
        return;
    }
    const size_t digits = name == 'u' ? 4 : name == 'U' ? 8 : 0;
    const std::string_view number = text.substr(std::min(at + 2, text.size()), digits);
    uint32_t code = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), code, 16);
    if (digits == 0 || number.size() != digits || error != std::errc() || end != number.data() + digits ||
        code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff))
        refuse("expected \\b \\t \\n \\f \\r \\\" \\\\ \\uXXXX or \\UXXXXXXXX in a string, found ", found());
    at += digits + 2;
    const auto put = [&out](uint32_t byte) { out += static_cast<char>(byte); };
    const auto tail = [&](int shift) { put(0x80 | (code >> shift & 0x3f)); };
    if (code < 0x80) return put(code);
    if (code < 0x800) return put(0xc0 | code >> 6), tail(0);
    if (code < 0x10000) return put(0xe0 | code >> 12), tail(6), tail(0);
    put(0xf0 | code >> 18), tail(12), tail(6), tail(0);
}

// Decimal integers and floats, underscores between digits.
json Reader::read_number() {
    const size_t start = at;
    std::string digits;
    bool good = true;
    for (; is_bare(peek()) || peek() == '+' || peek() == '.'; at++) {
        if (text[at] != '_')
            digits += text[at];
        else
            good = good && is_digit(text[at - 1]) && at + 1 < text.size() && is_digit(text[at + 1]);
    }
    // JSON's grammar of a number is TOML's, but for the plus and the underscores.
    if (digits[0] == '+' && digits[1] != '-') digits.erase(0, 1);
    const json value = json::parse(digits, nullptr, false);
    const bool whole = digits.find_first_of(".eE") == digits.npos;
    if (good && value.is_number() && !(whole && value.is_number_float())) return value;  // not past 64 bits
    at = start;
    refuse("expected a decimal number of at most 64 bits, found ", found());
}

}  // namespace

bool is_utf8(std::string_view text) {
    try {
        json(text).dump();
        return true;
    } catch (const json::exception&) {
        return false;
    }
}

std::vector<TomlEntry> read_toml(const std::string& path) {
    const MappedFile file(path);
    if (!is_utf8(file.text())) fail(path, ": expected UTF-8 text");
    Reader reader{path, file.text()};
    reader.refuse_control_characters();
    std::vector<TomlEntry> entries;
    std::set<std::string> seen;
    while (reader.at < reader.text.size()) {
        reader.skip_blanks();
        if (reader.skip_newline() || reader.at >= reader.text.size()) continue;
        TomlEntry entry{reader.read_key(), {}, reader.line};
        reader.skip_blanks();
        if (reader.peek() != '=')
            reader.refuse("expected = after ", quote(entry.key), ", found ", reader.found());
        reader.at++;
        reader.skip_blanks();
        entry.value = reader.read_value(false);
        reader.skip_blanks();
        if (!reader.skip_newline() && reader.at < reader.text.size())
            reader.refuse("expected the end of the line after the value of ", quote(entry.key), ", found ",
                          reader.found());
        if (!seen.insert(entry.key).second) reader.refuse(quote(entry.key), " stands in the file twice");
        entries.push_back(std::move(entry));
    }
    return entries;
}

std::string toml_value(const nlohmann::ordered_json& value) {
    if (value.is_array()) {
        std::string list;
        for (const auto& item : value) list += (list.empty() ? "" : ", ") + toml_value(item);
        return "[" + list + "]";
    }
    // JSON's escapes are TOML's, except that TOML wants DEL escaped.
    std::string text;
    for (const char c : value.dump()) text += c == '\x7f' ? "\\u007f" : std::string(1, c);
    return text;
}

}  // namespace llamac
