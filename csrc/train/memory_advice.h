// The smallest change of the flags with which a run fits into the available memory.
#pragma once
#include <string>

#include "model/config.h"
#include "run/options.h"

namespace llamac {

// What the model's arena would take on each of `ranks` devices: a complete plan, nothing is allocated.
int64_t planned_bytes(const Config& config, const Options& options, int64_t ranks);

// The flags with which it takes at most `free` bytes: more recomputation, then smaller micro-batches, then fewer bytes
// per parameter, then all of them. Empty: none do.
std::string least_change(const Config& config, const Options& options, int64_t ranks, int64_t free);

}  // namespace llamac
