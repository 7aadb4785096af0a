// Lists of words and numbers in flags, and similar words for messages.
#pragma once
#include <charconv>
#include <string>
#include <string_view>
#include <vector>

namespace llamac {

// The words between commas, which may be empty; of "" none.
std::vector<std::string> split_list(const std::string& list);
// "a, b or c".
std::string alternatives(const std::vector<std::string>& words);

// As std::printf prints it, up to 511 bytes.
std::string formatted(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

// Whether the whole text is one number.
template <class T>
bool parse_number(std::string_view text, T& number) {
    const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    return error == std::errc() && stop == text.data() + text.size();
}

// " (did you mean --steps?)": the name within two edits, else up to three names that contain the unknown one; "": none.
std::string suggestion(const std::string& name, const std::vector<std::string>& known,
                       const std::string& dashes = "");

}  // namespace llamac
