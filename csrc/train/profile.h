// --profile: where the time of a step goes, operation by operation.
#pragma once
#include <cstdint>
#include <string>

namespace llamac {

// From here on every call of an operation is timed.
void start_profile();
// Stops, prints a table (time a step, share, GFLOP/s, GB/s by the descriptions' least counts) and writes
// OUT/profile.json. seconds: of all `steps` together, so that what no operation accounts for shows as
// "other".
void finish_profile(const std::string& out, int64_t steps, double seconds);

}  // namespace llamac
