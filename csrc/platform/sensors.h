// A device's state as reported by its driver. NaN: not reported.
#pragma once
#include <limits>
#include <string>

namespace llamac {

struct Sensors {
    static constexpr double not_known = std::numeric_limits<double>::quiet_NaN();
    double watts = not_known, celsius = not_known;  // power, temperature of the chip
    double clock_mhz = not_known, memory_clock_mhz = not_known;
    double ecc_corrected = not_known,
           ecc_uncorrected = not_known;  // errors of the memory since the driver was loaded
};

// Reads the files of Linux's amdgpu driver (kernel documentation: "GPU Power/Thermal Controls and Monitoring", "AMDGPU RAS
// Support"). folder: /sys/bus/pci/devices/0000:c1:00.0.
Sensors read_amdgpu_sensors(const std::string& folder);

}  // namespace llamac
