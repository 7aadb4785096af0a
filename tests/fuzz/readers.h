// Every reader of a file from elsewhere, as a function of bytes: what libFuzzer (harness.cpp) and tests/data/read_inputs.cpp call.
#pragma once
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace llamac {

struct Reader {
    const char* name;
    // Reads the bytes, and whatever the reader wrote of what it accepted. Throws Error.
    void (*read)(std::string_view bytes);
};

std::span<const Reader> readers();

// Why the bytes are refused; "": they are accepted. Aborts where the message is not one line of bounded length.
std::string refusal(const Reader& reader, std::string_view bytes);

}  // namespace llamac
