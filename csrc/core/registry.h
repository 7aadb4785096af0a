// All operations of the program, by name. They register themselves, in any order: before main(), or, where the program has
// them for several instruction sets (platform/cpu_level.h), when somebody first asks for them.
#pragma once
#include <string_view>
#include <vector>

#include "core/operation.h"

namespace llamac {

// Throws Error where LLAMAC_CPU_LEVEL asks for what is not there.
const std::vector<Operation*>& operations();
// Throws Error where there is no such operation.
Operation& find_operation(std::string_view name);
// Operation's constructor calls it.
void register_operation(Operation& operation);

// Throws Error where a derivative names an operation or an operand that does not exist, or leaves out what may not be.
// To be called once main() has begun: then all operations are there.
void check_derivative(const Description& op, const Derivative& derivative);
void check_derivatives();  // of all operations

}  // namespace llamac
