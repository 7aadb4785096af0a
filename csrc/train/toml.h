// The part of TOML that configuration files need: `key = value` lines, values strings, numbers, booleans and
// arrays of them. What it takes, Python's tomllib reads to the same values; the rest of TOML is refused with
// the file and the line. CLI11's own reader will not do: version 2.1.2 cuts strings at '#', knows no escapes
// and loses the types of values.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace llamac {

struct TomlEntry {
    std::string key;
    nlohmann::json value;
    int line;  // from 1
};

// In the file's order; no key twice. Throws Error.
std::vector<TomlEntry> read_toml(const std::string& path);

bool is_utf8(std::string_view text);

// A string, number, boolean or array of them as TOML.
std::string toml_value(const nlohmann::ordered_json& value);

}  // namespace llamac
