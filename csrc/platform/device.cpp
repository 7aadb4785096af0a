#include "platform/error.h"
#include "platform/hip.h"

namespace llamac {

void device_failed(hipError_t error, const char* expression, const char* file, int line) {
    check_failed(std::string(expression) + " failed at " + file + ":" + std::to_string(line) + ": " +
                 hipGetErrorString(error));
}

void grid_too_large(const Grid& grid) {
    fail(grid.file, ":", grid.line, ": a grid of ", grid.blocks.x, " blocks of ", grid.threads.x,
         " threads, expected fewer than ", device_properties().grid_threads,
         " threads in one dimension: use smaller batches");
}

#if !defined(LLAMAC_CPU)  // the emulated device describes itself
int current_device() {
    int device = 0;
    CHECK(hipGetDevice(&device));
    return device;
}
int device_count() {
    int devices = 0;
    CHECK(hipGetDeviceCount(&devices));
    return devices;
}
void use_device(int device) {
    CHECK(hipSetDevice(device));
}
const DeviceProperties& device_properties() {
    static hipDeviceProp_t p;  // keeps the name
    static const DeviceProperties properties = [] {
        int device = 0;
        hipError_t error = hipGetDevice(&device);
        if (error == hipSuccess) error = hipGetDeviceProperties(&p, device);
        if (error != hipSuccess)
            fail("no GPU was found (", hipGetErrorString(error),
                 "): this program was built for one; make PLATFORM=cpu builds one for the CPU");
        return DeviceProperties{p.name,
                                p.warpSize,
                                p.multiProcessorCount,
                                static_cast<int64_t>(largest_shared_memory(p)),
                                last_cache_bytes(p),
                                static_cast<int64_t>(p.totalGlobalMem),
                                false,
                                has_warpgroups(p),
                                is_cdna3(p),
                                fp8_units(p),
                                grid_threads};
    }();
    return properties;
}
#endif

}  // namespace llamac
