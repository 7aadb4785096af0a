// The output of --list-kernels: operations with their variants, where they run and their limits.
#pragma once
#include <string>

namespace llamac {

// operation: its name, or "all". Throws Error for an unknown name.
void list_kernels(const std::string& operation);

}  // namespace llamac
