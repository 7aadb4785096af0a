#include "platform/usage.h"

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
    return std::min(kib_line("/proc/meminfo", "MemAvailable:"),
                    cgroup_memory_gib("/proc/self/cgroup", "/sys/fs/cgroup"));
}

double cgroup_memory_gib(const std::string& list, const std::string& mounts) {
    double least = std::numeric_limits<double>::infinity();
    std::ifstream file(list);
    for (std::string line; std::getline(file, line);) {
        // "0::/user.slice/run" of version 2, "4:memory:/run" of version 1.
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == line.npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const bool unified = controllers.empty();
        if (!unified && controllers != "memory") continue;
        const std::string mount = mounts + (unified ? "" : "/memory");
        // Limits of the groups above apply as well. In a container, the path may be the host's, and its mount the group.
        for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
            const auto at = [&](const char* name) { return mount + path + name; };
            double limit = 0, used = 0;
            if (std::ifstream(at(unified ? "/memory.max" : "/memory.limit_in_bytes")) >> limit &&
                std::ifstream(at(unified ? "/memory.current" : "/memory.usage_in_bytes")) >> used) {
                // Pages of files that were read once: the kernel gives them back first.
                std::ifstream counts(at("/memory.stat"));
                const std::string wanted = unified ? "inactive_file" : "total_inactive_file";
                double count = 0;
                for (std::string key; counts >> key >> count;)
                    if (key == wanted) used -= count;
                least = std::min(least, std::max(limit - used, 0.0) / (1 << 30));
            }
            if (path.find('/') == path.npos) break;
        }
    }
    return least;
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
            kib_line("/proc/meminfo", "MemTotal:") - kib_line("/proc/meminfo", "MemAvailable:"),
            percent,
            device.sensors};
    return last;
}

}  // namespace llamac
