#pragma once
#include <cstdint>
#include <set>
#include <string>

namespace llamac {

// Removes the events after `step`, so that a resumed run logs no step twice, and lines cut short by a crash. Atomic; a missing
// log is no error. Throws Error. Returns the names of the events of `step`.
std::set<std::string> truncate_log(const std::string& path, int64_t step);

}  // namespace llamac
