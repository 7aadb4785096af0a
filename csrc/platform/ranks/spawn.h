// --devices: this program starts its ranks itself, on one host.
#pragma once
#include <cstdint>

namespace llamac {

// Starts `count` processes of this program with the same arguments, and torchrun's variables in their environment; passes
// signals on to them and waits for them. When one fails, the others have `seconds` to end, then they are killed; they also
// end with this process, however it dies. Returns the exit status: that of the first process that failed, or 0. Throws Error
// where a process cannot be started.
int run_ranks(int64_t count, char** argv, double seconds);

}  // namespace llamac
