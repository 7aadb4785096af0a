// The output of --list-kernels: every operation with its variants, where they run and their limits.
#pragma once

namespace llamac {

void list_kernels();

}  // namespace llamac
