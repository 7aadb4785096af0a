// What --profile and the estimates see of a run (Context::observer).
#pragma once
#include <cstdint>
#include <functional>

#include "platform/hip.h"

namespace llamac {

struct Call;
struct Variant;

// The axes of a mesh (model/mesh.h) whose exchanges are between the kernels of a pass.
enum class ExchangeAxis : uint8_t { tensor, context };

// Callbacks for every enqueued call, copy and collective, for --profile. Calls by a launcher are part of its own call.
struct Observer {
    std::function<void(hipStream_t stream)> before;
    std::function<void(const Call& call, const Variant& variant)> after_run;
    std::function<void(int64_t bytes, hipStream_t stream)> after_copy;
    // bytes: exchanged with other ranks.
    std::function<void(const char* name, int64_t bytes, hipStream_t stream)> after_collective = {};
    // Of a dry run: a call, and an exchange for which the stream waits, among the ranks of an axis. bytes: that each rank sends.
    std::function<void(const Call& call)> planned = {};
    std::function<void(ExchangeAxis axis, int64_t bytes)> planned_exchange = {};
};

}  // namespace llamac
