// Written twice on purpose: llamac/base/files.py has the same; tests/data/test_readers.py::test_c_and_python_agree.
//
// JSON from files, and text from files in error messages.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace llamac {

// The text as JSON; `where` begins the message of an Error. Stricter than JSON in that an object has no key
// twice and nesting ends at 32 levels; also without a byte-order mark.
nlohmann::json parse_json(std::string_view text, const std::string& where);
nlohmann::json read_json(const std::string& path);
// Bytes of a file of JSON, a manifest among them. The largest tokenizer.json has half of it.
constexpr int64_t max_json = 128 << 20;

bool is_utf8(std::string_view text);

// Something from a file for one line of an error message: as ASCII JSON, cut to a readable length.
std::string excerpt(const nlohmann::json& value);
std::string quote(std::string_view text);

}  // namespace llamac
