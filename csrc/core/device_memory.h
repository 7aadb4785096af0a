// RAII for device memory.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <functional>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "platform/hip.h"

namespace llamac {

// Uninitialized device memory (in the emulation: NaN). Throws Error if there is no room.
struct DeviceMemory {
    void* data = nullptr;
    int64_t bytes = 0;

    DeviceMemory() = default;
    explicit DeviceMemory(int64_t bytes_) : bytes(bytes_) {
        if (hipMalloc(&data, static_cast<size_t>(bytes > 0 ? bytes : 1)) == hipSuccess) return;
        static_cast<void>(hipGetLastError());  // it is reported here, not by the next launch
        fail("memory: ", bytes >> 20, " MiB are needed, ",
             device_properties().emulated ? "the machine" : device_properties().name,
             " has no room for them");
    }
    DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
    DeviceMemory& operator=(DeviceMemory&& other) noexcept {
        std::swap(data, other.data);
        std::swap(bytes, other.bytes);
        return *this;
    }
    ~DeviceMemory() {
        if (data) static_cast<void>(hipFree(data));  // with null it would still end a graph's capture
    }
};

// Copies between host and device, in either direction; blocking.
inline void copy_bytes(void* to, const void* from, int64_t bytes) {
    CHECK(hipMemcpy(to, from, static_cast<size_t>(bytes), hipMemcpyDefault));
}

// Pinned host memory. Throws Error if there is no room.
template <class T>
struct PinnedMemory {
    T* data = nullptr;

    explicit PinnedMemory(int64_t count) {
        void* memory = nullptr;
        size_t bytes = 0;
        if (__builtin_mul_overflow(count, sizeof(T), &bytes) || hipHostMalloc(&memory, bytes) != hipSuccess) {
            static_cast<void>(hipGetLastError());
            fail("memory: ", (static_cast<uint64_t>(count) >> 20) * sizeof(T),
                 " MiB of pinned memory are needed, the host has no room");
        }
        data = static_cast<T*>(memory);
    }
    PinnedMemory(const PinnedMemory&) = delete;
    ~PinnedMemory() { static_cast<void>(hipHostFree(data)); }
};

// Pinned host memory of many gigabytes. Throws Error if there is no room. All threads touch its pages, large ones where the system
// has them, before they are pinned: hipHostMalloc() takes ten times as long.
struct PinnedPages {
    char* data = nullptr;
    int64_t bytes;

    explicit PinnedPages(int64_t bytes_) : bytes(bytes_) {
        const auto size = static_cast<size_t>(bytes);
        void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) fail_for_room();
        data = static_cast<char*>(memory);
        static_cast<void>(madvise(memory, size, MADV_HUGEPAGE));
        const int64_t page = sysconf(_SC_PAGESIZE);
#pragma omp parallel for
        for (int64_t at = 0; at < bytes; at += page) data[at] = 0;
        if (hipHostRegister(memory, size, hipHostRegisterDefault) == hipSuccess) return;
        static_cast<void>(hipGetLastError());
        munmap(memory, size);
        fail_for_room();
    }
    PinnedPages(const PinnedPages&) = delete;
    ~PinnedPages() {
        static_cast<void>(hipHostUnregister(data));
        munmap(data, static_cast<size_t>(bytes));
    }

  private:
    [[noreturn]] void fail_for_room() const {
        fail("memory: ", bytes >> 20, " MiB of pinned memory are needed, the host has no room");
    }
};

// Host memory for device memory that the host fills or reads: the memory itself if the host can address it, as in the
// emulation.
struct HostCopy {
    void* data;
    explicit HostCopy(void* device_, int64_t bytes_) : data(device_), device(device_), bytes(bytes_) {
        if (device_properties().emulated) return;
        copy.resize(static_cast<size_t>(bytes));
        data = copy.data();
    }
    HostCopy& from_device() {
        if (data != device) copy_bytes(data, device, bytes);
        return *this;
    }
    void to_device() const {
        if (data != device) copy_bytes(device, data, bytes);
    }

  private:
    void* device;
    int64_t bytes;
    std::vector<char> copy;
};

// The elements of host or device memory, contiguous, in host memory and another type.
inline void copy_as(DType type, void* to, const Tensor& from) {
    if (from.dtype == type) return copy_bytes(to, from.data, from.bytes());
    HostCopy copy(from.data, from.bytes());
    convert(copy.from_device().data, from.dtype, to, type, from.elements());
}

// The scratch memory of operations, one per stream, as large as the largest request. Growing waits for the device.
struct Workspace {
    int64_t asked = 0;                           // the largest request
    std::function<void*(int64_t bytes)> source;  // provides memory; null: it allocates its own

    // Begins with memory of the caller.
    void use(void* data_, int64_t bytes_) { data = data_, bytes = bytes_; }
    void* reserve(int64_t wanted) {
        if (wanted > bytes && source) {
            use(source(wanted), wanted);
        } else if (wanted > bytes) {
            CHECK(hipDeviceSynchronize());
            use(nullptr, 0);  // should there be no room for more
            memory = DeviceMemory();
            memory = DeviceMemory(wanted);
            use(memory.data, wanted);
        }
        return data;
    }

  private:
    void* data = nullptr;
    int64_t bytes = 0;
    DeviceMemory memory;
};

}  // namespace llamac
