// The use of the current device by all processes, as reported by its driver.
#pragma once
#include "platform/sensors.h"

namespace llamac {

struct DeviceUse {
    double used_bytes = 0;  // of the device's memory; 0 on a CPU
    double busy_percent;    // of the driver's last sample period, a second at most; NaN: not known
    Sensors sensors = {};
};
DeviceUse device_use();

}  // namespace llamac
