// The table of flags, configs/tables/flags.toml, with the member of Options that each flag sets.
#pragma once
#include <array>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/fp8.h"
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

// The texts of an enumeration that a flag chooses from, in the order of the enumerators.
template <class E>
inline constexpr auto texts = nullptr;
template <>
inline constexpr std::array texts<bool> = {"off", "on"};
template <>
inline constexpr std::array texts<Init> = {"random", "load"};
template <>
inline constexpr std::array texts<ScheduleShape> = {"cosine", "linear", "constant", "wsd"};
template <>
inline constexpr std::array texts<MatmulDType> = {"storage", "fp8"};
template <>
inline constexpr std::array texts<Fp8Scaling> = {"tensor", "delayed", "row"};
template <>
inline constexpr std::array texts<Fp8Gradients> = {"e5m2", "e4m3"};
template <>
inline constexpr std::array texts<Fp8Weights> = {"recomputed", "stored"};

template <class E>
std::optional<E> find_choice(std::string_view text) {
    for (size_t i = 0; i < texts<E>.size(); i++)
        if (text == texts<E>[i]) return static_cast<E>(i);
    return std::nullopt;
}

}  // namespace llamac
