// All operations of the program, by name. They register themselves before main(), or, in a program with several instruction
// sets (platform/cpu_level.h), at the first use.
#pragma once
#include <string_view>
#include <vector>

#include "core/operation.h"

namespace llamac {

// Throws Error if LLAMAC_CPU_LEVEL names a level that does not exist.
const std::vector<Operation*>& operations();
// Throws Error if there is none of this name.
Operation& find_operation(std::string_view name);
// Operation's constructor calls it.
void register_operation(Operation& operation);

// Throws Error if a derivative names a missing operation or operand, or omits a required operand. To be called after main()
// has begun.
void check_derivative(const Description& op, const Derivative& derivative);
void check_derivatives();  // of all operations

}  // namespace llamac
