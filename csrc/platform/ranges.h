// Named ranges on a profiler's time line: NVTX for Nsight Systems, roctx for rocprofv3 (docs/profiling.md). Without a
// profiler, a range costs one test of a pointer.
#pragma once
#include <cstdint>
#include <cstdio>

namespace llamac {

struct RangeLibrary {
    int (*push)(const char* name) = nullptr;  // null: no profiler is attached
    int (*pop)() = nullptr;
};
// The library of the profiler that is attached when the first range begins, or the one that LLAMAC_RANGES names; throws Error
// if that lacks roctx's functions.
const RangeLibrary& range_library();

// From construction to destruction, on the calling thread; ranges nest.
struct Range {
    explicit Range(const char* name) {
        if (library.push) library.push(name);
    }
    Range(const char* name, int64_t number) {  // "step 12"
        if (!library.push) return;
        char text[64];
        std::snprintf(text, sizeof text, "%s %lld", name, static_cast<long long>(number));
        library.push(text);
    }
    ~Range() {
        if (library.pop) library.pop();
    }
    Range(const Range&) = delete;

  private:
    const RangeLibrary& library = range_library();
};

}  // namespace llamac
