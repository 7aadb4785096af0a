// libFuzzer's entry. LLAMAC_READER names the reader that gets the inputs: the process stands for one.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "platform/error.h"
#include "readers.h"

namespace {

const llamac::Reader& chosen() {
    const char* const name = std::getenv("LLAMAC_READER");
    for (const llamac::Reader& reader : llamac::readers())
        if (name && reader.name == std::string(name)) return reader;
    llamac::check_failed("LLAMAC_READER: expected the name of a reader (tests/fuzz/readers.cpp)");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const llamac::Reader& reader = chosen();
    llamac::refusal(reader, {reinterpret_cast<const char*>(data), size});
    return 0;
}
