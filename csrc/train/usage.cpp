#include "train/usage.h"

#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

#include "platform/device_use.h"

namespace llamac {
namespace {

// Drivers count a GPU's use over a sixth of a second or more, and asking costs tens of microseconds.
constexpr double shortest = 0.1;  // seconds

// The value of "Key:  123 kB" in GiB; 0 where the file, or the line, is not there.
double kib_line(const char* path, const std::string& key) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);)
        if (line.compare(0, key.size(), key) == 0)
            return std::strtod(line.c_str() + key.size(), nullptr) / (1 << 20);
    return 0;
}

double process_cpu_seconds() {
    rusage use{};
    getrusage(RUSAGE_SELF, &use);
    const auto seconds = [](const timeval& t) {
        return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
    };
    return seconds(use.ru_utime) + seconds(use.ru_stime);
}

}  // namespace

double available_memory_gib() {
    return kib_line("/proc/meminfo", "MemAvailable:");
}

UsageMeter::UsageMeter() : then(std::chrono::steady_clock::now()), cpu_seconds(process_cpu_seconds()) {}

Usage UsageMeter::read() {
    constexpr double gib = 1 << 30;
    const auto now = std::chrono::steady_clock::now();
    const double seconds = std::chrono::duration<double>(now - then).count();
    if (seconds < shortest && last.rss_gib > 0) return last;
    const double cpu = process_cpu_seconds(), percent = 100 * (cpu - cpu_seconds) / std::max(seconds, 1e-9);
    then = now;
    cpu_seconds = cpu;
    const DeviceUse device = device_use();
    last = {device.used_bytes / gib,
            device.busy_percent,
            kib_line("/proc/self/status", "VmHWM:"),
            kib_line("/proc/meminfo", "MemTotal:") - available_memory_gib(),
            percent,
            device.sensors};
    return last;
}

}  // namespace llamac
