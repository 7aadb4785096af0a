#include "platform/usage.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <string>

#include "platform/error.h"
#include "platform/hip.h"
#include "platform/shared_library.h"

namespace llamac {
namespace {

// The use of the current device by all processes, as reported by its driver.
struct DeviceUse {
    double used_bytes = 0;  // of the device's memory; 0 on a CPU
    double busy_percent;    // of the driver's last sample period, a second at most; NaN: not known
    Sensors sensors = {};
};

constexpr double not_known = Sensors::not_known;

#if defined(LLAMAC_CPU)
DeviceUse device_use() {
    return {0, not_known, {}};
}
#else
// The device's utilization is not known where the vendor's library is missing or does not answer.

// "0000:c1:00.0": common to the runtime and the vendor's library, whose device numbers differ.
struct PciAddress {
    char text[32] = "";
    PciAddress() { CHECK(hipDeviceGetPCIBusId(text, sizeof text, current_device())); }
};

#if defined(LLAMAC_NVIDIA)
// NVML's C interface, as NVIDIA's reference manual gives it: functions return 0 for success; nvmlUtilization_t is the
// percent of the last sample period in which a kernel ran, then that in which memory was read or written. Power is in
// milliwatts, a clock in MHz. Enumerators: temperature of the GPU 0; clocks of the multiprocessors 1, of the memory 2; ECC
// errors corrected 0 or not 1, counted since the driver was loaded 0.
struct Utilization {
    unsigned gpu, memory;
};
struct Monitor {
    void* device = nullptr;
    int (*rates)(void* device, Utilization*) = nullptr;
    int (*power)(void* device, unsigned*) = nullptr;
    int (*temperature)(void* device, int sensor, unsigned*) = nullptr;
    int (*clock)(void* device, int which, unsigned*) = nullptr;
    int (*ecc_errors)(void* device, int kind, int counter, unsigned long long*) = nullptr;

    Monitor() {
        const SharedLibrary library({"libnvidia-ml.so.1"});
        library.find(power, "nvmlDeviceGetPowerUsage");
        library.find(temperature, "nvmlDeviceGetTemperature");
        library.find(clock, "nvmlDeviceGetClockInfo");
        library.find(ecc_errors, "nvmlDeviceGetTotalEccErrors");
        int (*init)() = nullptr;
        int (*by_pci)(const char*, void** device) = nullptr;
        if (!library.find(init, "nvmlInit_v2") || !library.find(by_pci, "nvmlDeviceGetHandleByPciBusId_v2") ||
            !library.find(rates, "nvmlDeviceGetUtilizationRates"))
            return;
        if (init() != 0 || by_pci(PciAddress().text, &device) != 0) device = nullptr;
    }
    double busy_percent() const {
        Utilization u{};
        return device && rates(device, &u) == 0 ? u.gpu : not_known;
    }
    // The result of a function of NVML, its last argument, in this unit.
    template <class T, class F, class... A>
    double ask(double unit, F function, A... arguments) const {
        T value = 0;
        const bool known = device && function && function(device, arguments..., &value) == 0;
        return known ? unit * static_cast<double>(value) : not_known;
    }
    Sensors sensors() const {
        return {ask<unsigned>(1e-3, power),
                ask<unsigned>(1, temperature, 0),
                ask<unsigned>(1, clock, 1),
                ask<unsigned>(1, clock, 2),
                ask<unsigned long long>(1, ecc_errors, 0, 0),
                ask<unsigned long long>(1, ecc_errors, 1, 0)};
    }
};
#else
// ROCm SMI's C interface, as AMD's reference manual gives it: functions return 0 for success; a device's PCI number is
// domain << 32 | bus << 8 | device << 3 | function, with other things in bits 28 to 31; busy is in percent.
struct Monitor {
    uint32_t index = 0;
    bool found = false;
    int (*busy)(uint32_t index, uint32_t* percent) = nullptr;

    Monitor() {
        const SharedLibrary library({"librocm_smi64.so.1", "librocm_smi64.so.7", "librocm_smi64.so.6"});
        int (*init)(uint64_t flags) = nullptr;
        int (*count)(uint32_t*) = nullptr;
        int (*pci)(uint32_t index, uint64_t*) = nullptr;
        if (!library.find(init, "rsmi_init") || !library.find(count, "rsmi_num_monitor_devices") ||
            !library.find(pci, "rsmi_dev_pci_id_get") || !library.find(busy, "rsmi_dev_busy_percent_get"))
            return;
        unsigned domain = 0, bus = 0, device = 0;
        uint32_t devices = 0;
        if (std::sscanf(PciAddress().text, "%x:%x:%x", &domain, &bus, &device) != 3) return;
        if (init(0) != 0 || count(&devices) != 0) return;
        const uint64_t wanted = uint64_t{domain} << 32 | bus << 8 | device << 3,
                       others = uint64_t{0xf0000007};
        for (uint64_t id = 0; index < devices && !found; index += found ? 0 : 1)
            found = pci(index, &id) == 0 && (id & ~others) == wanted;
    }
    double busy_percent() const {
        uint32_t percent = 0;
        return found && busy(index, &percent) == 0 ? percent : not_known;
    }
    // The kernel's own files say as much as the library, whose structures change from version to version.
    Sensors sensors() const {
        return read_amdgpu_sensors(std::string("/sys/bus/pci/devices/") + PciAddress().text);
    }
};
#endif

DeviceUse device_use() {
    static const Monitor monitor;
    size_t free = 0, total = 0;
    CHECK(hipMemGetInfo(&free, &total));
    return {static_cast<double>(total - free), monitor.busy_percent(), monitor.sensors()};
}
#endif

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
