// Configuration files: flat `key = value` lines of TOML, read with toml++. CLI11's own reader is not sufficient:
// version 2.1.2 cuts strings at '#', does not support escapes, and loses the types of values.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace llamac {

struct TomlEntry {
    std::string key;
    nlohmann::json value;
    int line;  // from 1
};

// The keys, in their order, of a file, or of llamac's run configuration configs/NAME where there is no file NAME.
// Throws Error with the file and the line; a table in it is an error too.
std::vector<TomlEntry> read_toml(const std::string& path);

// configs/tables/NAME.toml as JSON; its tables are objects.
nlohmann::json read_table(const std::string& name);

// Name and version of the reader.
std::string toml_library();

// A string, number, boolean or array of them as TOML.
std::string toml_value(const nlohmann::ordered_json& value);

}  // namespace llamac
