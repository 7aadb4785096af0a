#include "train/toml.h"

#include <algorithm>
#include <filesystem>
#include <optional>

#include "core/embedded.h"
#include "core/file.h"
#include "core/json.h"
#include "platform/error.h"

// toml++ 3.3 meets some malformed text with a failed assertion ("[#"), which would end the program, or, with NDEBUG, with
// undefined behaviour. Here an assertion always holds or throws.
namespace {
struct FailedAssertion {};
constexpr void assert_holds(bool holds) {
    if (!holds) throw FailedAssertion();
}
}  // namespace
#undef NDEBUG
#define TOML_EXCEPTIONS 1
#define TOML_MAX_NESTED_VALUES 16
#define TOML_ASSERT(expression) assert_holds(static_cast<bool>(expression))
#include <toml++/toml.h>

namespace llamac {
namespace {

std::string place(const std::string& path, int64_t line) {
    return path + ": line " + std::to_string(line) + ": ";
}

// toml++ 3.3 makes a table of each part of a dotted key, and frees them by recursion. Dots that follow one another are no
// part of a key, but of a comment.
void check_dots(std::string_view text, const std::string& path) {
    constexpr int most = 256;
    int64_t line = 1;
    int dots = 0;
    for (size_t i = 0; i < text.size(); i++) {
        if (text[i] == '\n') line++, dots = 0;
        if (text[i] == '.' && text.substr(i + 1, 1) != "." && ++dots > most)
            fail(place(path, line), "expected at most ", most, " dots, found more");
    }
}

bool fails_an_assertion(std::string_view text) {
    try {
        static_cast<void>(toml::parse(text));
    } catch (const toml::parse_error&) {
    } catch (const FailedAssertion&) {
        return true;
    }
    return false;
}

// The last line of the shortest beginning of the text that fails.
int64_t line_of_assertion(std::string_view text) {
    size_t passes = 0, fails = text.size();
    while (fails - passes > 1) {
        const size_t middle = passes + (fails - passes) / 2;
        (fails_an_assertion(text.substr(0, middle)) ? fails : passes) = middle;
    }
    return 1 + std::count(text.begin(), text.begin() + static_cast<int64_t>(passes), '\n');
}

toml::table parse(std::string_view text, const std::string& path) {
    check_dots(text, path);
    try {
        return toml::parse(text);
    } catch (const toml::parse_error& error) {
        fail(place(path, error.source().begin.line), error.description());
    } catch (const FailedAssertion&) {
        fail(place(path, line_of_assertion(text)), "expected TOML");
    }
}

nlohmann::json to_json(const std::string& path, std::string_view key, const toml::node& node,
                       bool tables = false) {
    if (const auto* text = node.as_string()) return text->get();
    if (const auto* number = node.as_integer()) return number->get();
    if (const auto* flag = node.as_boolean()) return flag->get();
    if (const auto* number = node.as_floating_point(); number && std::isfinite(number->get()))
        return number->get();
    if (const auto* list = node.as_array()) {
        nlohmann::json items = nlohmann::json::array();
        for (const toml::node& item : *list) items.push_back(to_json(path, key, item, tables));
        return items;
    }
    if (const auto* table = node.as_table(); table && tables) {
        nlohmann::json object = nlohmann::json::object();
        for (const auto& [name, item] : *table)
            object[std::string(std::string_view(name))] = to_json(path, name, item, tables);
        return object;
    }
    std::ostringstream found;
    found << node.type();
    fail(place(path, node.source().begin.line), quote(std::string(key)),
         ": expected a string, a finite number, true, false or a list, found ",
         node.is_floating_point() ? "inf or nan" : found.str());
}

}  // namespace

std::vector<TomlEntry> read_toml(const std::string& path) {
    std::error_code none;  // what cannot be looked at is not there
    const bool is_name = path.find('/') == path.npos && !std::filesystem::exists(path, none);
    const EmbeddedFile* const own = is_name ? find_embedded(path) : nullptr;
    const std::string file = own ? "" : read_file(path);
    const toml::table table = parse(own ? own->text : std::string_view(file), path);
    std::vector<TomlEntry> entries;
    for (const auto& [key, node] : table) {
        const std::string_view name = key;
        const int line = static_cast<int>(key.source().begin.line);
        entries.push_back({std::string(name), to_json(path, name, node), line});
    }
    const auto earlier = [](const TomlEntry& a, const TomlEntry& b) { return a.line < b.line; };
    std::stable_sort(entries.begin(), entries.end(), earlier);
    return entries;
}

nlohmann::json read_table(const std::string& name) {
    const EmbeddedFile* const file = find_embedded("tables/" + name + ".toml");
    CHECK(file != nullptr);
    const std::string path = "configs/" + std::string(file->name);
    return to_json(path, "", parse(file->text, path), true);
}

std::string toml_library() {
    return "toml++ " + std::to_string(TOML_LIB_MAJOR) + "." + std::to_string(TOML_LIB_MINOR) + "." +
           std::to_string(TOML_LIB_PATCH);
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
