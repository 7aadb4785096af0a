// Where and how calls run. Every call takes a context; nothing else can change what a call computes.
#pragma once
#include <cstdint>
#include <functional>

#include "core/device_memory.h"

namespace llamac {

struct Call;
struct Variant;
struct KernelChoices;
struct GemmAlgorithms;

enum class Backend : uint8_t { host, device };

// Is told of whatever is put on a stream: --profile records events there. Calls that a launcher makes lie within its
// own.
struct Observer {
    std::function<void(hipStream_t stream)> before;
    std::function<void(const Call& call, const Variant& variant)> after_run;
    std::function<void(int64_t bytes, hipStream_t stream)> after_copy;
    // bytes: that move between this rank and the others.
    std::function<void(const char* name, int64_t bytes, hipStream_t stream)> after_collective = {};
};

struct Context {
    Backend backend = Backend::host;
    hipStream_t stream = nullptr;
    Workspace* workspace = nullptr;          // null: each call takes memory of its own, and gives it back
    const KernelChoices* kernels = nullptr;  // null: the default variants
    GemmAlgorithms* gemms = nullptr;         // null: the library's guesses
    // Work that is observed has to be launched directly: what a graph replays is not seen.
    const Observer* observer = nullptr;
    bool dry_run = false;  // calls are checked, and workspace told what they ask for; nothing runs
};

// Where the model computes: the device, or the host in a CPU build. Throws Error where there is no device.
Context computing_context();

// Between host and device, either way, on the context's stream; without waiting where the host's side is pinned.
void copy_bytes_async(const Context& context, void* to, const void* from, int64_t bytes);
// The same for rows of `width` bytes, which begin to_pitch and from_pitch bytes apart.
void copy_rows_async(const Context& context, void* to, int64_t to_pitch, const void* from, int64_t from_pitch,
                     int64_t width, int64_t rows);

}  // namespace llamac
