#include "core/json.h"

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "core/file.h"
#include "platform/error.h"

namespace llamac {

bool is_utf8(std::string_view text) {
    try {
        nlohmann::json(text).dump();
        return true;
    } catch (const nlohmann::json::exception&) {
        return false;
    }
}

nlohmann::json parse_json(std::string_view text, const std::string& where) {
    using nlohmann::json;
    constexpr int max_depth = 32;
    std::vector<std::set<std::string>> keys;  // of the objects that are open
    const auto check = [&](int depth, json::parse_event_t event, json& value) {
        if (depth > max_depth)
            fail(where, ": expected at most ", max_depth, " levels of nesting, found more");
        if (event == json::parse_event_t::object_start) keys.emplace_back();
        if (event == json::parse_event_t::object_end) keys.pop_back();
        if (event == json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second)
            fail(where, ": expected each key once, found ", quote(value.get<std::string>()), " twice");
        return true;
    };
    // nlohmann/json skips a mark, and ends at a NUL.
    if (text.substr(0, 3) == "\xef\xbb\xbf") fail(where, ": expected JSON, found a byte-order mark");
    if (const size_t nul = text.find('\0'); nul != text.npos)
        fail(where, ": expected JSON, found an error at byte ", nul + 1);
    try {
        return json::parse(text.begin(), text.end(), check);
    } catch (const json::parse_error& e) {
        fail(where, ": expected JSON, found an error at byte ", e.byte);
    } catch (const json::out_of_range&) {
        fail(where, ": expected JSON, found a number that is too large");
    }
}

nlohmann::json read_json(const std::string& path) {
    return parse_json(read_file(path, max_json), path);
}

std::string excerpt(const nlohmann::json& value) {
    constexpr size_t max_size = 100;
    const std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
    return text.size() > max_size ? text.substr(0, max_size) + "..." : text;
}

std::string quote(std::string_view text) {
    return excerpt(text);
}

}  // namespace llamac
