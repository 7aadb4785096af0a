// LLAMAC_MFMA: this code has kernels in the shape of CDNA3: the host's code for AMD, that of gfx942 and gfx950, and that of the
// emulated device, which stands for them. DeviceProperties::cdna3 says whether the device is one.
#pragma once
#include "platform/hip.h"

#if defined(LLAMAC_AMD) && (!defined(__HIP_DEVICE_COMPILE__) || defined(__gfx942__) || defined(__gfx950__))
#define LLAMAC_MFMA
#elif defined(LLAMAC_CPU) && LLAMAC_WARP == 64
#define LLAMAC_MFMA
#endif
