#pragma once
#include <cstdint>
#include <set>
#include <string>

namespace llamac {

// Cuts a log back to the events up to and including `step`, so that a run that goes on from there has no step
// twice. Lines cut short by a crash are dropped. Atomic; nothing happens where there is no log. Throws Error.
// Returns the names of the events of `step`.
std::set<std::string> truncate_log(const std::string& path, int64_t step);

}  // namespace llamac
