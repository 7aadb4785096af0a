// Where and how calls run: goes through every one of them.
#pragma once
#include <cstdint>

#include "core/device_memory.h"

namespace llamac {

enum class Where : uint8_t { host, device };

struct Context {
    Where where = Where::host;
    hipStream_t stream = nullptr;
    Workspace* workspace = nullptr;  // null: the process's own, for callers with one stream
    bool dry_run = false;            // calls are checked, and workspace told what they ask for; nothing runs
};

// Where the model computes: the device, or the host in a CPU build. Throws Error where there is no device.
Context computing_context();

}  // namespace llamac
