// The tables that C and Python share: the texts of configs/tables/*.toml, made part of the program by tables.cmake.
#pragma once

namespace llamac {

extern const char* const devices_table;
extern const char* const flags_table;

}  // namespace llamac
