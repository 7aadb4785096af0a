#include "train/peak.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/clock.h"
#include "core/device_memory.h"
#include "ops/operations.h"
#include "platform/stream.h"
#include "platform/threads.h"
#include "run/toml.h"

namespace llamac {
namespace {

double measured_flops() {
    constexpr int64_t n = 1024;
    std::vector<float> x(n * n, 0.5f), weight(n * n, 0.25f), out(n * n);
    const auto square = [](std::vector<float>& data) { return make_tensor(data.data(), DType::f32, {n, n}); };
    const auto start = Clock::now();
    double best = 1e30;
    for (int tries = 0; tries < 3 || seconds_since(start) < 0.1; tries++) {
        const auto begin = Clock::now();
        matmul_forward({}, {.out = square(out), .x = square(x), .weight = square(weight)});
        best = std::min(best, seconds_since(begin));
    }
    return 2.0 * n * n * n / best;
}

// The least seconds of a copy of `bytes`, which copy(to, from) makes.
template <class Copy>
double best_of_ten(const DeviceMemory& to, const DeviceMemory& from, const Copy& copy) {
    double best = 1e30;
    for (int tries = 0; tries < 11; tries++) {
        const Event begin, end;
        begin.record(nullptr);
        copy(static_cast<char*>(to.data), static_cast<const char*>(from.data));
        end.record(nullptr);
        end.wait();
        if (tries > 0) best = std::min(best, 1e-3 * end.ms_since(begin));
    }
    return best;
}

}  // namespace

double published_flops(const std::string& device, int multiprocessors, DType dtype) {
    static const nlohmann::json table = read_table("devices");
    for (const nlohmann::json& row : table.at("device")) {
        const nlohmann::json &names = row.at("names"), &tflops = row.at("tflops");
        if (std::find(names.begin(), names.end(), device) == names.end()) continue;
        const double share = multiprocessors / row.at("multiprocessors").get<double>();
        return 1e12 * tflops.value(name(dtype), 0.0) * std::min(share, 1.0);
    }
    return 0;
}

double peak_flops(DType dtype) {
    const DeviceProperties& device = device_properties();
    return computing_context().backend == Backend::host
               ? measured_flops()
               : published_flops(device.name, device.multiprocessors, dtype);
}

double measure_copy_rate() {
    const bool host = computing_context().backend == Backend::host;
    // Several times any cache, MI300X's 256 MiB of it included.
    const int64_t max_bytes = int64_t{host ? 64 : 1024} << 20, min_bytes = 16 << 20;
    for (int64_t bytes = max_bytes; bytes >= min_bytes; bytes /= 2) {
        try {
            const DeviceMemory from(bytes), to(bytes);
            CHECK(hipMemset(from.data, 0x3c, static_cast<size_t>(bytes)));
            const int threads = host ? host_threads() : 1;
            const int64_t part = bytes / threads;
            const double seconds = best_of_ten(to, from, [&](char* t, const char* f) {
#pragma omp parallel for num_threads(threads)
                for (int64_t i = 0; i < threads; i++)
                    CHECK(hipMemcpyAsync(t + i * part, f + i * part, static_cast<size_t>(part),
                                         hipMemcpyDefault, nullptr));
            });
            return 2.0 * static_cast<double>(part * threads) / seconds;
        } catch (const Error&) {  // no room: try a smaller one
        }
    }
    return 0;
}

}  // namespace llamac
