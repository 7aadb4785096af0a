// What the microbenchmarks share: `./rmsnorm_forward` checks every variant against the float64 reference,
// then times all of them over their block sizes. Operands, shapes by dimension letter, bytes and FLOPs come
// from the operation's description. The programs are one, `benchmark`, by its sources' names; by its own it measures all.
//
//   --variant naive · --shape N=16384,C=4096 · --preset 8b|small|tiny · --dtype bf16|f32 · --documents 1024
#pragma once
#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

#include "core/operation.h"

namespace llamac {

struct Benchmark {
    const char* operation;
    std::vector<const char*> absent = {};               // operands that are left out
    std::pair<const char*, const char*> in_place = {};  // this output lies in that input's memory
    const char* widths_8b = "";                         // where the preset 8b's do not suit, as --shape
    std::vector<const char*> first = {}, last = {};     // indices that are all 0, or all the largest
};

// What a source measures. The program ends with 0; 1 where a check failed; 2 for bad flags.
struct Benchmarks {
    Benchmarks(std::initializer_list<Benchmark> rows);
};

// ---- benchmark_time.hip
struct Limit {
    double gbps = 0;      // read and written
    const char* by = "";  // the faster: "memcpy" or "our copy"
};
// The best copy of this device: `bytes` read and written, in memory that no cache holds.
Limit copy_limit(double bytes);
// Median milliseconds of a call; work(k) makes it on operand set k < sets, on the stream.
double median_ms(hipStream_t stream, int sets, const std::function<void(int)>& work);

}  // namespace llamac
