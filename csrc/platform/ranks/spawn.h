// --devices: this program starts its ranks itself, on one host.
#pragma once
#include <cstdint>

namespace llamac {

// Starts `count` processes of this program with the same arguments, and torchrun's variables in their environment; passes
// signals on to them and waits for them. If one fails, the others are killed after `seconds`; all end with this process.
// Returns the exit status of the first process that failed, or 0. Throws Error if a process cannot be started.
int run_ranks(int64_t count, char** argv, double seconds);

}  // namespace llamac
