#include "platform/ranges.h"

#include <cstdlib>

#include "platform/error.h"
#include "platform/shared_library.h"

#if defined(LLAMAC_NVIDIA) && __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define LLAMAC_NVTX
#endif

namespace llamac {
namespace {

bool is_set(const char* variable) {
    const char* value = std::getenv(variable);
    return value && *value;
}

RangeLibrary roctx(const SharedLibrary& library) {
    RangeLibrary found;
    if (!library.find(found.push, "roctxRangePushA") || !library.find(found.pop, "roctxRangePop")) return {};
    return found;
}

RangeLibrary find_library() {
    if (is_set("LLAMAC_RANGES")) {
        const char* path = std::getenv("LLAMAC_RANGES");
        const RangeLibrary found = roctx(SharedLibrary({path}));
        if (!found.push)
            fail("LLAMAC_RANGES: expected a library with roctxRangePushA and roctxRangePop, found ", path);
        return found;
    }
#if defined(LLAMAC_NVTX)
    // Set by Nsight's tools for the program that they start; the header's functions load it.
    if (is_set("NVTX_INJECTION64_PATH"))
        return {[](const char* name) { return nvtxRangePushA(name); }, [] { return nvtxRangePop(); }};
#elif defined(LLAMAC_AMD)
    if (is_set("ROCPROF_MARKER_API_TRACE"))  // rocprofv3 --marker-trace
        return roctx(SharedLibrary({"librocprofiler-sdk-roctx.so.1", "librocprofiler-sdk-roctx.so"}));
#endif
    return {};
}

}  // namespace

const RangeLibrary& range_library() {
    static const RangeLibrary library = find_library();
    return library;
}

}  // namespace llamac
