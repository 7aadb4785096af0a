// What the readers ask of the device and of the build, for programs that have neither kernels nor an emulated device.
#include "platform/hip.h"
#include "run/version.h"

namespace llamac {

const DeviceProperties& device_properties() {
    static const DeviceProperties host = {"host", 1, 1, 0, 0, 0, true, false, Fp8Units::none};
    return host;
}

std::string version_text() {
    return "fuzz";
}

}  // namespace llamac
