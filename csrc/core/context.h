// Where and how calls run. Every call takes a context; no other state can change its result.
#pragma once
#include <cstdint>

#include "platform/hip.h"

namespace llamac {

struct KernelChoices;
struct GemmAlgorithms;
struct Observer;   // core/observer.h
struct Workspace;  // core/device_memory.h

enum class Backend : uint8_t { host, device };

struct Context {
    Backend backend = Backend::host;
    hipStream_t stream = nullptr;
    Workspace* workspace = nullptr;          // null: each call allocates its own
    const KernelChoices* kernels = nullptr;  // null: the default variants
    GemmAlgorithms* gemms = nullptr;         // null: the library's guesses
    // Observed work must be launched directly: replayed graphs are not observed.
    const Observer* observer = nullptr;
    bool dry_run = false;  // calls are checked and reserve workspace; nothing runs
};

// The context of the model: the device, or the host in a CPU build. Throws Error without a device.
Context computing_context();
// Its backend; the device also where a build for one finds none.
Backend computing_backend();

// Copies between host and device, in either direction, on the context's stream; asynchronous if the host memory is pinned.
void copy_bytes_async(const Context& context, void* to, const void* from, int64_t bytes);
// The same for rows of `width` bytes at distances of to_pitch and from_pitch bytes.
void copy_rows_async(const Context& context, void* to, int64_t to_pitch, const void* from, int64_t from_pitch,
                     int64_t width, int64_t rows);

}  // namespace llamac
