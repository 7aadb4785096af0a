#include "train/peak.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "ops/operations.h"
#include "platform/stream.h"
#include "platform/threads.h"

namespace llamac {
namespace {

// TFLOP/s of dense matrix products, bf16 and f32 with sums in f32, no TF32, no sparsity: vendors' data sheets and white
// papers, read 2026-11. Where those print a rate with sparsity only, half of it.
struct Published {
    const char* name;     // as the runtime reports it
    int multiprocessors;  // of the whole device, as the runtime counts them
    double bf16, f32;
};
constexpr Published table[] = {
    // AMD Instinct MI300X data sheet; f32: matrix cores
    {"AMD Instinct MI300X", 304, 1307.4, 163.4},
    {"AMD Instinct MI300X VF", 304, 1307.4, 163.4},
    // AMD Instinct MI325X data sheet
    {"AMD Instinct MI325X", 304, 1307.4, 163.4},
    {"AMD Instinct MI325X VF", 304, 1307.4, 163.4},
    // AMD Instinct MI200 series data sheet. A module is two devices of 110 units, an MI250's of 104: the share counts.
    {"AMD Instinct MI250X", 220, 383.0, 95.7},
    {"AMD Instinct MI250X/MI250", 220, 383.0, 95.7},
    {"AMD Instinct MI250X / MI250", 220, 383.0, 95.7},
    // AMD Radeon RX 7900 XTX product page; the runtime counts pairs of its 96 units
    {"AMD Radeon RX 7900 XTX", 48, 122.8, 61.4},
    {"Radeon RX 7900 XTX", 48, 122.8, 61.4},
    // NVIDIA H200 data sheet and Hopper white paper (SXM); H200 NVL data sheet
    {"NVIDIA H200", 132, 989.4, 66.9},
    {"NVIDIA H200 NVL", 132, 835.5, 60.0},
    // NVIDIA H100 data sheet and Hopper white paper: SXM, PCIe, NVL
    {"NVIDIA H100 80GB HBM3", 132, 989.4, 66.9},
    {"NVIDIA H100 PCIe", 114, 756.0, 51.2},
    {"NVIDIA H100 NVL", 132, 835.5, 60.0},
    // NVIDIA A100 data sheet
    {"NVIDIA A100-SXM4-40GB", 108, 312.0, 19.5},
    {"NVIDIA A100-SXM4-80GB", 108, 312.0, 19.5},
    {"NVIDIA A100-PCIE-40GB", 108, 312.0, 19.5},
    {"NVIDIA A100 80GB PCIe", 108, 312.0, 19.5},
    // NVIDIA Ada GPU architecture white paper, appendix A
    {"NVIDIA GeForce RTX 4090", 128, 165.2, 82.6},
};

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

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

double published_flops(const char* name, int multiprocessors, DType dtype) {
    for (const Published& device : table)
        if (std::strcmp(device.name, name) == 0) {
            const double share = static_cast<double>(multiprocessors) / device.multiprocessors;
            return 1e12 * (dtype == DType::bf16 ? device.bf16 : device.f32) * std::min(share, 1.0);
        }
    return 0;
}

double peak_flops(DType dtype) {
    const DeviceProperties& device = device_properties();
    return computing_context().where == Where::host
               ? measured_flops()
               : published_flops(device.name, device.multiprocessors, dtype);
}

double measure_copy_rate() {
    const bool host = computing_context().where == Where::host;
    // Several times any cache, MI300X's 256 MiB of it included.
    const int64_t most = int64_t{host ? 64 : 1024} << 20, least = 16 << 20;
    for (int64_t bytes = most; bytes >= least; bytes /= 2) {
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
