// The peak rates of this machine, the 100% of measured rates.
#pragma once
#include "core/tensor.h"

namespace llamac {

// FLOP/s of a matrix product with operands of this type. A GPU's: its vendor's published dense rate
// (configs/tables/devices.toml), in the share of the device that this process has; 0 where the table does not know it.
// The CPU's: that of a 1024^3 product in f32, all threads, the best of the tries that fit in a tenth of a second.
double peak_flops(DType dtype);

// The published rate, FLOP/s, of what the runtime calls `device`, with so many multiprocessors; 0: not known.
double published_flops(const std::string& device, int multiprocessors, DType dtype);

// Bytes read and written a second by a large copy within the computing device's memory, measured; 0 where there is no
// room for one.
double measure_copy_rate();

}  // namespace llamac
