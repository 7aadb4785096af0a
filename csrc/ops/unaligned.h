// load_part (core/device.h) for rows that may begin at any element: whole vectors of them in one access where the device can.
// Element by element, a wave waits for 128 bytes at a time instead of 1,024. It does not wait for stores, which stay as they are.
#pragma once
#include "core/device.h"
#include "platform/unaligned.h"

namespace llamac {

template <bool whole, class T>
__device__ inline uint4 load_row_part(const T* row, int64_t c, int64_t C) {
    if constexpr (!whole && vectors_anywhere)
        if (c + vector_size<T> <= C) {
            uint4 bits;
            __builtin_memcpy(static_cast<void*>(&bits), row + c, sizeof(bits));
            return bits;
        }
    return load_part<whole>(row, c, C);
}

}  // namespace llamac
