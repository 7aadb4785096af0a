// The peak rates of this machine, the 100% of measured rates.
#pragma once
#include "core/tensor.h"

namespace llamac {

// FLOP/s of a matrix product with operands of this type. GPU: the vendor's published dense rate
// (configs/tables/devices.toml), times this process's share of the device; 0: not in the table. CPU: a 1024^3 product in f32
// on all threads, the best within a tenth of a second.
double peak_flops(DType dtype);

// The published FLOP/s of the runtime's `device` with this number of multiprocessors; 0: not known.
double published_flops(const std::string& device, int multiprocessors, DType dtype);

// Measured bytes per second, read and written, of a large copy within the device's memory; 0 without room for one.
double measure_copy_rate();

}  // namespace llamac
