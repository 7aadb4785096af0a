// How much device memory a run needs, and whether it is available.
#pragma once
#include <string>
#include <vector>

#include "model/model.h"
#include "run/options.h"

namespace llamac {

struct MemoryRow {
    std::string group;  // "weights", "activations", ...
    int64_t tensors = 0, bytes = 0;
    bool is_on_host = false;  // beside what the model computes in: not part of the total
};

// The model's tensors by group; what the runtime and other programs have taken; what the device has in all.
std::vector<MemoryRow> memory_rows(const Model& model, bool allocated);

// Error where the planned model does not fit in what the device has free now: what is needed, what is there, and the
// least change of the flags that would make it fit (train/memory_advice.h).
void check_memory(const Model& model, const Options& options);

// The flags with --fp8-weights auto replaced: stored where that plan fits into the free memory of the device.
Options with_fp8_weights(const Config& config, const Options& options, int64_t ranks);

}  // namespace llamac
