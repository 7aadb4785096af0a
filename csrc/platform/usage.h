// The machine's resources that a run uses.
#pragma once
#include <chrono>
#include <string>

#include "platform/sensors.h"

namespace llamac {

struct Usage {
    double gpu_mem_gib = 0;  // in use on the device, by all processes; 0: the CPU computes
    double gpu_percent = 0;  // of the driver's last sample period that the device was busy; NaN: not known
    double rss_gib = 0;      // this process, its peak
    double system_mem_gib =
        0;  // in use on the machine, by all processes, without what the kernel would give back
    double cpu_percent = 0;  // of this process since the last reading; 100: one core
    Sensors sensors = {};    // of the device
};

// Of the machine, with what the kernel would give back, as far as the process's cgroups let it have that; 0: not known.
double available_memory_gib();
// What the cgroups that a file such as /proc/self/cgroup lists leave of their limits, by their files below `mounts`; infinity
// without limits.
double cgroup_memory_gib(const std::string& list, const std::string& mounts);

struct UsageMeter {
    UsageMeter();
    // The last reading again where it is less than a tenth of a second old.
    Usage read();

  private:
    std::chrono::steady_clock::time_point then;
    double cpu_seconds;  // until then
    Usage last;
};

}  // namespace llamac
