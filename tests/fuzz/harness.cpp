// libFuzzer's entry: the program fuzz_NAME feeds the reader NAME, LLAMAC_READER.
#include <cstdint>
#include <string>

#include "platform/error.h"
#include "readers.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const llamac::Reader& reader = [] -> const llamac::Reader& {
        for (const llamac::Reader& r : llamac::readers())
            if (r.name == std::string(LLAMAC_READER)) return r;
        llamac::check_failed("no reader " LLAMAC_READER);
    }();
    llamac::refusal(reader, {reinterpret_cast<const char*>(data), size});
    return 0;
}
