// How the microbenchmarks measure.
#pragma once
#include <functional>

#include "platform/hip.h"

namespace llamac {

struct Limit {
    double gbps = 0;      // read and written
    const char* by = "";  // the faster: "memcpy" or "our copy"
};
// The best copy of this device: `bytes` read and written, in memory that no cache holds.
Limit copy_limit(double bytes);
// Median milliseconds of a call; work(k) makes it on operand set k < sets, on the stream.
double median_ms(hipStream_t stream, int sets, const std::function<void(int)>& work);

}  // namespace llamac
