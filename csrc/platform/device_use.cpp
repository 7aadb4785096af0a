#include "platform/device_use.h"

#include <cstdio>

#include "platform/error.h"
#include "platform/hip.h"
#include "platform/shared_library.h"

namespace llamac {

constexpr double not_known = Sensors::not_known;

#if defined(LLAMAC_CPU)
DeviceUse device_use() {
    return {0, not_known, {}};
}
#else
namespace {

// The device's utilisation is not known where the vendor's library is missing or does not answer.

// "0000:c1:00.0": what the runtime and the vendor's library both know the device by; they number devices differently.
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

}  // namespace

DeviceUse device_use() {
    static const Monitor monitor;
    size_t free = 0, total = 0;
    CHECK(hipMemGetInfo(&free, &total));
    return {static_cast<double>(total - free), monitor.busy_percent(), monitor.sensors()};
}
#endif

}  // namespace llamac
