// The smallest change of the flags with which a run fits into the available memory.
#pragma once
#include <string>

#include "model/config.h"
#include "run/options.h"

namespace llamac {

// Bytes of the model's arena on each of `ranks` devices, by a complete plan without allocation.
int64_t planned_bytes(const Config& config, const Options& options, int64_t ranks);

// Flags with which the arena has at most `free` bytes: more recomputation, then smaller micro-batches, then fewer bytes per
// parameter, then all of them. Empty: none suffice.
std::string least_change(const Config& config, const Options& options, int64_t ranks, int64_t free);

}  // namespace llamac
