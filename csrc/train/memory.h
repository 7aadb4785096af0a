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
    bool is_on_host = false;  // not part of the total
};

// The memory that a device's runtime takes beside the model.
int64_t runtime_bytes(const ModelOptions& options);

// The model's tensors by group, and the memory of the runtime and of other programs.
std::vector<MemoryRow> memory_rows(const Model& model, bool allocated);

// Throws Error if the planned model does not fit into the free memory of the device: needed, found, and the smallest change of
// flags with which it fits.
void check_memory(const Model& model, const Options& options);

// The options with --fp8-weights auto replaced: stored if that plan fits into the free memory of the device.
Options with_fp8_weights(const Config& config, const Options& options, int64_t ranks);

}  // namespace llamac
