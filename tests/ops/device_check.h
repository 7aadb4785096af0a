// What the checks of the platform layer share: memory that a kernel and the host see, and runs in three orders.
#pragma once
#include "check.h"
#include "core/device.h"
#include "core/device_memory.h"

namespace llamac {

template <class T>
struct Buffer {
    DeviceMemory memory;
    T* data;

    explicit Buffer(size_t count)
        : memory(static_cast<int64_t>(count * sizeof(T))), data(static_cast<T*>(memory.data)) {}
    explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
        copy_bytes(data, values.data(), memory.bytes);
    }
    std::vector<T> read() const {
        CHECK(hipDeviceSynchronize());
        std::vector<T> values(static_cast<size_t>(memory.bytes) / sizeof(T));
        copy_bytes(values.data(), data, memory.bytes);
        return values;
    }
};

inline int device_warp() {
    return device_properties().warp_size;
}

// The checks, on the emulated device in each order of lanes; returns main's exit status.
inline int run_device_checks(int argc, char** argv) {
#if defined(LLAMAC_CPU)
    using emulation::Order;
    return run_checks(
        argc, argv,
        {[] { emulation::set_order(Order::forward); }, [] { emulation::set_order(Order::reversed); },
         [] { emulation::set_order(Order::shuffled); }});
#else
    return run_checks(argc, argv);
#endif
}

}  // namespace llamac
