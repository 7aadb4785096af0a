// How the microbenchmarks measure: device events around replayed graphs over rotating memory, and the limit
// that a copy sets.
#include <algorithm>

#include "benchmark.h"
#include "core/device.h"
#include "core/device_memory.h"
#include "platform/stream.h"

namespace llamac {
namespace {

template <class Work>
double elapsed_ms(hipStream_t stream, const Work& work) {
    const Event begin, end;
    begin.record(stream);
    work();
    end.record(stream);
    end.wait();
    return end.ms_since(begin);
}

// Four 128-bit loads in flight a thread.
constexpr int copy_vectors = 4, copy_threads = 512;

__global__ void __launch_bounds__(copy_threads) copy_kernel(uint4* to, const uint4* from, int64_t count) {
    const int64_t first = int64_t{blockIdx.x} * copy_vectors * blockDim.x + threadIdx.x;
    uint4 kept[copy_vectors] = {};
#pragma unroll
    for (int v = 0; v < copy_vectors; v++)
        if (first + v * blockDim.x < count) kept[v] = load_streaming(from + first + v * blockDim.x);
#pragma unroll
    for (int v = 0; v < copy_vectors; v++)
        if (first + v * blockDim.x < count) store_streaming(to + first + v * blockDim.x, kept[v]);
}

}  // namespace

double median_ms(hipStream_t stream, int sets, const std::function<void(int)>& work) {
    constexpr double budget_ms = 200;
    work(0);  // what is made once is made now
    CHECK(hipStreamSynchronize(stream));
    const double first = elapsed_ms(stream, [&] { work(sets > 1 ? 1 : 0); });
    if (first > budget_ms / 4) return first;
    // A graph starts in a microsecond; short calls are repeated until that is a small part.
    const int turns = std::clamp(static_cast<int>(2.0 / (first * sets)), 1, 16);
    Graph graph(stream, [&] {
        for (int k = 0; k < turns * sets; k++) work(k % sets);
    });
    graph.replay();
    CHECK(hipStreamSynchronize(stream));
    std::vector<double> times;
    double spent = 0;
    while (times.size() < 5 || (spent < budget_ms && times.size() < 100)) {
        const double ms = elapsed_ms(stream, [&] { graph.replay(); });
        times.push_back(ms / (turns * sets));
        spent += ms;
    }
    std::nth_element(times.begin(), times.begin() + static_cast<int64_t>(times.size() / 2), times.end());
    return times[times.size() / 2];
}

Limit copy_limit(double bytes) {
    const DeviceProperties& d = device_properties();
    const int64_t half = static_cast<int64_t>(bytes / 2) / 16 * 16;
    const int64_t wanted = 4 * d.cache_bytes / std::max<int64_t>(half, 1) / 2 + 1;
    const int sets = std::max(2, static_cast<int>(wanted));
    const DeviceMemory from(half * sets), to(half * sets);
    CHECK(hipMemset(from.data, 0x3c, static_cast<size_t>(from.bytes)));
    const Stream stream;
    const auto at = [&](const DeviceMemory& m, int k) { return static_cast<char*>(m.data) + k * half; };
    const double library = median_ms(stream.handle, sets, [&](int k) {
        CHECK(hipMemcpyAsync(at(to, k), at(from, k), static_cast<size_t>(half), hipMemcpyDefault,
                             stream.handle));
    });
    const double ours = median_ms(stream.handle, sets, [&](int k) {
        launch(Grid(blocks_for(half / 16, copy_vectors * copy_threads), copy_threads, stream.handle),
               copy_kernel, reinterpret_cast<uint4*>(at(to, k)), reinterpret_cast<const uint4*>(at(from, k)),
               half / 16);
    });
    const double moved = 2e-6 * static_cast<double>(half);
    return ours < library ? Limit{moved / ours, "our copy"} : Limit{moved / library, "memcpy"};
}

}  // namespace llamac
