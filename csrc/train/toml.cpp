#include "train/toml.h"

#include <algorithm>
#include <filesystem>
#include <optional>

#define TOML_EXCEPTIONS 0
#include <toml++/toml.h>

#include "core/embedded.h"
#include "core/file.h"
#include "core/json.h"
#include "platform/error.h"

namespace llamac {
namespace {

// toml++ says what is wrong in several lines at times; an error of ours is one.
std::string one_line(std::string_view text) {
    std::string line;
    for (const char c : text) line += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    return line;
}

std::string place(const std::string& path, const toml::source_region& source) {
    return path + ": line " + std::to_string(source.begin.line) + ": ";
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
    fail(place(path, node.source()), quote(std::string(key)),
         ": expected a string, a finite number, true, false or a list, found ",
         node.is_floating_point() ? "inf or nan" : found.str());
}

}  // namespace

std::vector<TomlEntry> read_toml(const std::string& path) {
    std::error_code none;  // what cannot be looked at is not there
    const bool is_name = path.find('/') == path.npos && !std::filesystem::exists(path, none);
    const EmbeddedFile* const own = is_name ? find_embedded(path) : nullptr;
    const std::string file = own ? "" : read_file(path);
    const toml::parse_result parsed = toml::parse(own ? own->text : std::string_view(file));
    if (!parsed) fail(place(path, parsed.error().source()), one_line(parsed.error().description()));
    std::vector<TomlEntry> entries;
    for (const auto& [key, node] : parsed.table()) {
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
    const toml::parse_result parsed = toml::parse(file->text);
    const std::string path = "configs/" + std::string(file->name);
    if (!parsed) fail(place(path, parsed.error().source()), one_line(parsed.error().description()));
    return to_json(path, "", parsed.table(), true);
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
