// Use of the machine's resources by a run.
#pragma once
#include <chrono>
#include <string>

#include "platform/sensors.h"

namespace llamac {

struct Usage {
    double gpu_mem_gib = 0;     // in use on the device, by all processes; 0 on a CPU
    double gpu_percent = 0;     // of the driver's last sample period that the device was busy; NaN: not known
    double rss_gib = 0;         // this process, its peak
    double system_mem_gib = 0;  // in use on the machine, without reclaimable memory
    double cpu_percent = 0;     // of this process since the last reading; 100: one core
    Sensors sensors = {};       // of the device
};

// Memory of the machine that is free or reclaimable, within the limits of the process's cgroups; 0: not known.
double available_memory_gib();
// The rest of the limits of the cgroups that a file such as /proc/self/cgroup lists, by their files below `mounts`; infinity
// without limits.
double cgroup_memory_gib(const std::string& list, const std::string& mounts);

struct UsageMeter {
    UsageMeter();
    // Repeats the last reading for a tenth of a second.
    Usage read();

  private:
    std::chrono::steady_clock::time_point then;
    double cpu_seconds;  // until then
    Usage last;
};

}  // namespace llamac
