// vectors_anywhere: whether a lane accesses 128 bits at once at any address, not at multiples of 16 bytes alone: on AMD's GPUs, whose
// ABI (HSA) sets the mode.
#pragma once

namespace llamac {
#if defined(LLAMAC_AMD)
constexpr bool vectors_anywhere = true;
#else
constexpr bool vectors_anywhere = false;
#endif
}  // namespace llamac
