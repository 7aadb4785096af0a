// The table of flags, configs/tables/flags.toml, with the member of Options that each flag sets.
#pragma once
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "run/options.h"

namespace llamac {

// The value of a flag as JSON, as in a file or in the table.
struct FlagField {
    std::function<bool(Options& options, const nlohmann::json& value)> set;  // false: a value of another type
    std::function<nlohmann::json(const Options& options)> get;
};

struct FlagRow {
    std::string group, name, type;  // type: text, integer, number, switch or list
    std::string value;              // its name in --help
    std::string help;
    std::string alone;                 // the value where the flag is given without one; "": it needs one
    nlohmann::json initial;            // the default
    std::vector<std::string> choices;  // accepted texts; none: any
    double low = -std::numeric_limits<double>::infinity(), high = std::numeric_limits<double>::infinity();
    bool high_excluded = false;
    bool in_file = true;  // also a key of the TOML file
    std::string
        path;  // "one", "list": the value is a path, or several, separated by commas; "": another text
    FlagField field;
};

const std::vector<FlagRow>& flags();

// Sets the member of the flag. Throws Error, which begins with `where`, for a value that the flag does not accept.
void assign(Options& options, const FlagRow& flag, const nlohmann::json& value, const std::string& where);

}  // namespace llamac
