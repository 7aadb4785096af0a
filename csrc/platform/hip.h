// The one header that says what the platform's runtime is called: HIP's names everywhere.
// AMD: HIP itself. NVIDIA: a short map to CUDA. CPU: a stream is nothing, qualifiers vanish.
#pragma once
#include <cstdint>

#if defined(LLAMAC_AMD)
#include <hip/hip_runtime.h>
#elif defined(LLAMAC_NVIDIA)
#include "platform/hip_on_nvidia.h"
#else
#define __host__
#define __device__
using hipStream_t = void*;
#endif
