// The platform layer under every kernel: indices, shuffles, reductions, LDS, 128-bit accesses, rounding, the
// runtime's calls. All against plain arithmetic on the host; on the emulated device in three orders of lanes.
// emulation_faults.cpp is the other half: what must not pass.
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "core/dispatch.h"
#include "core/registry.h"
#include "device_check.h"

using namespace llamac;

namespace {

std::vector<int> block_sizes() {
    return {device_warp(), 2 * device_warp(), 256, 1024};
}

// ---- indices

__global__ void indices_kernel(uint32_t* out) {
    const uint32_t block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const uint32_t thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const uint32_t packed = ((blockIdx.x * 10 + blockIdx.y) * 10 + blockIdx.z) * 1000 + threadIdx.x * 100 +
                            threadIdx.y * 10 + threadIdx.z;
    out[block * (blockDim.x * blockDim.y * blockDim.z) + thread] = packed;
}
TEST(indices) {
    const dim3 grid(3, 2, 4), block(5, 4, 3);
    const Buffer<uint32_t> out(24 * 60);
    launch(Grid(grid, block, nullptr), indices_kernel, out.data);
    std::vector<uint32_t> expected;
    for (uint32_t b = 0; b < 24; b++)
        for (uint32_t t = 0; t < 60; t++)
            expected.push_back(((b % 3 * 10 + b / 3 % 2) * 10 + b / 6) * 1000 + t % 5 * 100 + t / 5 % 4 * 10 +
                               t / 20);
    check(out.read() == expected, "indices of 3-D grids and blocks");
}

// ---- warp operations

template <class T>
__global__ void shuffle_kernel(T* exchanged, T* moved, T* rotated, int argument) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const T value = static_cast<T>(3 * i + 1);
    exchanged[i] = __shfl_xor(value, argument);
    moved[i] = __shfl_up(value, argument);
    rotated[i] = __shfl(value, (lane_index() + argument) % warp_size);
}
template <class T>
void check_shuffles(const char* type) {
    const int warp = device_warp(), count = 2 * 3 * warp;
    for (int argument = 1; argument < warp; argument++) {
        const Buffer<T> exchanged(count), moved(count), rotated(count);
        launch(Grid(2, 3 * warp, nullptr), shuffle_kernel<T>, exchanged.data, moved.data, rotated.data,
               argument);
        bool right = true;
        const std::vector<T> x = exchanged.read(), m = moved.read(), r = rotated.read();
        for (int i = 0; i < count; i++) {
            const int lane = i % warp, first = i - lane;
            const auto value = [&](int l) { return static_cast<T>(3 * (first + l) + 1); };
            right &= x[i] == value(lane ^ argument) && r[i] == value((lane + argument) % warp);
            right &= m[i] == value(lane < argument ? lane : lane - argument);
        }
        check(right, std::string("shuffles of ") + type + " by " + std::to_string(argument));
    }
}
TEST(shuffles) {
    check_shuffles<int>("int");
    check_shuffles<float>("float");
    check_shuffles<double>("double");
}

// ---- LDS

struct Halves {
    float first[max_threads_per_block];
    int second[max_threads_per_block];
};
__global__ void reverse_kernel(const int* in, int* out) {
    Halves& s = shared_memory<Halves>();
    int* dynamic = reinterpret_cast<int*>(dynamic_shared_memory());
    const int t = static_cast<int>(threadIdx.x), n = static_cast<int>(blockDim.x), at = blockIdx.x * n;
    s.first[t] = static_cast<float>(in[at + t]);
    s.second[t] = 2 * in[at + t];
    dynamic[t] = 3 * in[at + t];
    __syncthreads();
    out[at + t] = static_cast<int>(s.first[n - 1 - t]) + s.second[n - 1 - t] + dynamic[n - 1 - t];
}
// Barrier after barrier: no thread may be more than one ahead of another.
__global__ void tree_kernel(const int* in, int* out) {
    int* s = reinterpret_cast<int*>(dynamic_shared_memory());
    const unsigned t = threadIdx.x;
    int sum = 0;
    for (int repeat = 0; repeat < 3; repeat++) {
        s[t] = in[blockIdx.x * blockDim.x + t];
        __syncthreads();
        for (unsigned d = blockDim.x / 2; d > 0; d /= 2) {
            if (t < d) s[t] += s[t + d];
            __syncthreads();
        }
        sum += s[0];
        __syncthreads();
    }
    out[blockIdx.x * blockDim.x + t] = sum;
}
TEST(lds) {
    for (const int threads : block_sizes()) {
        const int count = 5 * threads;
        std::vector<int> in(count), reversed(count), sums(count);
        for (int i = 0; i < count; i++) in[i] = i * 37 % 1009;
        for (int i = 0; i < count; i++) {
            const auto block = in.begin() + i / threads * threads;
            reversed[i] = 6 * block[threads - 1 - i % threads];
            sums[i] = 3 * std::accumulate(block, block + threads, 0);
        }
        const Buffer<int> input(in), output(count), tree(count);
        const size_t bytes = threads * sizeof(int);
        launch(Grid(5, threads, nullptr, bytes), reverse_kernel, input.data, output.data);
        launch(Grid(5, threads, nullptr, bytes), tree_kernel, input.data, tree.data);
        check(output.read() == reversed, "LDS of " + std::to_string(threads) + " threads");
        check(tree.read() == sums, "barriers of " + std::to_string(threads) + " threads");
    }
}

// ---- 128 bits

template <class T>
__global__ void round_trip_kernel(const T* in, T* out, uint4* streamed) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    float x[vector_size<T>];
    unpack<T>(load128(in + i * vector_size<T>), x);
    store128(out + i * vector_size<T>, pack<T>(x));
    store128_streaming(streamed + i, load128_streaming(in + i * vector_size<T>));
}
// Every bit pattern of bf16; for floats as many, spread over all.
template <class T, class Bits>
void check_round_trip() {
    std::vector<T> in(1 << 16);
    for (uint32_t i = 0; i < in.size(); i++) {
        const Bits bits = static_cast<Bits>(sizeof(T) == 2 ? i : i * 65521u);
        std::memcpy(&in[i], &bits, sizeof bits);
    }
    const Buffer<T> input(in), output(in.size()), streamed(in.size());
    launch(Grid(in.size() / vector_size<T> / 128, 128, nullptr), round_trip_kernel<T>, input.data,
           output.data, reinterpret_cast<uint4*>(streamed.data));
    const std::vector<T> out = output.read(), same = streamed.read();
    bool right = true;
    for (size_t i = 0; i < in.size(); i++)
        right &= std::isnan(float(in[i])) ? std::isnan(float(out[i]))
                                          : std::memcmp(&in[i], &out[i], sizeof(T)) == 0;
    check(right, std::string("unpack and pack of ") + name(dtype_of<T>()));
    check(std::memcmp(in.data(), same.data(), in.size() * sizeof(T)) == 0, "streaming accesses");
}

template <class T, bool whole>
__global__ void parts_kernel(const T* in, T* out, T* beyond, int64_t C) {
    const int64_t c = int64_t{threadIdx.x} * vector_size<T>;
    const uint4 bits = load_part<whole>(in, c, C);
    store_part<whole>(out, c, C, bits);
    store128(beyond + c, bits);
}
// A row of C elements, then guards: `beyond` shows zeros where the row ends, `out` the guards as they were.
template <class T, bool whole>
void check_parts(int64_t C, int64_t offset) {
    constexpr int threads = 4, room = threads * vector_size<T>;
    std::vector<T> row(room + offset, T(-1.0f));
    for (int64_t c = 0; c < C; c++) row[offset + c] = T(static_cast<float>(c + 1));
    const std::vector<T> guards(room + offset, T(-2.0f));
    const Buffer<T> in(row), out(guards), beyond(room);
    launch(Grid(1, threads, nullptr), parts_kernel<T, whole>, in.data + offset, out.data + offset,
           beyond.data, C);
    const std::vector<T> stored = out.read(), loaded = beyond.read();
    bool right = true;
    for (int64_t c = -offset; c < room; c++) {
        const float value = c < 0 || c >= C ? -2.0f : static_cast<float>(c + 1);
        right &= float(stored[offset + c]) == value;
        if (c >= 0) right &= float(loaded[c]) == (c < C ? value : 0.0f);
    }
    check(right, std::string(whole ? "whole" : "partial") + " vectors of " + name(dtype_of<T>()) +
                     ", C=" + std::to_string(C) + " from element " + std::to_string(offset));
}
template <class T>
void check_all_parts() {
    for (int64_t C = 1; C <= 3 * vector_size<T> + 1; C++) {
        for (int64_t offset = 0; offset < 2; offset++) check_parts<T, false>(C, offset);
        if (C % vector_size<T> == 0) check_parts<T, true>(C, 0);
    }
}
TEST(vectors) {
    check_round_trip<float, uint32_t>();
    check_round_trip<bf16, uint16_t>();
    check_round_trip<fp16, uint16_t>();
    check_all_parts<float>();
    check_all_parts<bf16>();
    check_all_parts<fp16>();
}

__global__ void pack_kernel(const float* in, bf16* out) {
    const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 8;
    float x[8];
    for (int k = 0; k < 8; k++) x[k] = in[i + k];
    store128(out + i, pack<bf16>(x));
}
// To the nearest, ties to even, by looking at both neighbours in double.
float nearest_bf16(float x) {
    if (!std::isfinite(x)) return x;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t below = bits & 0xffff0000u, above = below + 0x10000u;
    const auto value = [](uint32_t u) {
        float f;
        std::memcpy(&f, &u, 4);
        return f;
    };
    // Above the largest bf16 stands what the next one would be: 2^128.
    const double high = std::isinf(value(above)) ? std::copysign(0x1p128, double(x)) : double(value(above));
    const double down = std::fabs(double(x) - double(value(below))), up = std::fabs(high - double(x));
    const bool even = (below & 0x10000u) == 0;
    return value(down < up || (down == up && even) ? below : above);
}
TEST(rounding) {
    std::vector<float> in = {0.0f,        -0.0f,       1.0f,       -1.0f,      1.00390625f, 1.01171875f,
                             0x1.00ffp0f, 0x1.0101p0f, 3.3895e38f, 3.4028e38f, -3.4028e38f, 0x1.fep127f,
                             0x1.ffp127f, 1e-40f,      -1e-45f,    0x1p-133f,  0x1.8p-134f, INFINITY,
                             -INFINITY,   NAN,         -NAN};
    const uint32_t payloads[] = {0x7f800001u, 0x7f80ffffu, 0xff800001u, 0x7fffffffu};
    for (const uint32_t u : payloads) {
        in.push_back(0);
        std::memcpy(&in.back(), &u, 4);
    }
    for (uint32_t i = 0; in.size() < 1 << 16; i++) {
        const uint32_t u = i * 2654435761u;
        in.push_back(0);
        std::memcpy(&in.back(), &u, 4);
    }
    const Buffer<float> input(in);
    const Buffer<bf16> output(in.size());
    launch(Grid(in.size() / 8 / 256, 256, nullptr), pack_kernel, input.data, output.data);
    const std::vector<bf16> out = output.read();
    int wrong = 0;
    for (size_t i = 0; i < in.size(); i++) {
        const float expected = nearest_bf16(in[i]), found = float(out[i]), host = float(bf16(in[i]));
        const auto is = [&](float x) {
            return std::isnan(expected) ? std::isnan(x) : std::memcmp(&x, &expected, 4) == 0;
        };
        if ((!is(found) || !is(host)) && wrong++ == 0)
            check(false, "bf16 of " + std::to_string(in[i]) + " is " + std::to_string(found) + " in pack, " +
                             std::to_string(host) + " by its constructor");
    }
    check(wrong == 0, std::to_string(wrong) + " roundings to bf16 are wrong");
}

// ---- atomics

__global__ void tickets_kernel(int* counter, int* tickets) {
    tickets[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(counter, 1);
}
TEST(atomics) {
    const Buffer<int> counter(std::vector<int>{5}), tickets(7 * 256);
    launch(Grid(7, 256, nullptr), tickets_kernel, counter.data, tickets.data);
    std::vector<int> found = tickets.read(), expected(7 * 256);
    std::sort(found.begin(), found.end());
    std::iota(expected.begin(), expected.end(), 5);
    check(found == expected && counter.read()[0] == 5 + 7 * 256, "atomicAdd gives each value once");
}

// ---- the runtime

__global__ void add_kernel(int* data, int value) {
    data[blockIdx.x * blockDim.x + threadIdx.x] += value;
}
TEST(runtime) {
    const Buffer<int> a(512), b(512);
    CHECK(hipMemset(a.data, 0, 512 * sizeof(int)));
    CHECK(hipMemsetAsync(a.data, 1, 256 * sizeof(int), nullptr));
    launch(Grid(2, 256, nullptr), add_kernel, a.data, 3);
    CHECK(hipMemcpyAsync(b.data, a.data, 512 * sizeof(int), hipMemcpyDefault, nullptr));
    CHECK(hipStreamSynchronize(nullptr));
    std::vector<int> expected(512, 3);
    std::fill(expected.begin(), expected.begin() + 256, 0x01010101 + 3);
    check(a.read() == expected && b.read() == expected);
    hipEvent_t begin, end;
    CHECK(hipEventCreate(&begin));
    CHECK(hipEventCreate(&end));
    CHECK(hipEventRecord(begin, nullptr));
    for (int i = 0; i < 20; i++) launch(Grid(2, 256, nullptr), add_kernel, a.data, 1);
    CHECK(hipEventRecord(end, nullptr));
    CHECK(hipEventSynchronize(end));
    float milliseconds = -1;
    CHECK(hipEventElapsedTime(&milliseconds, begin, end));
    check(milliseconds > 0 && milliseconds < 60e3f, "events measure " + std::to_string(milliseconds) + " ms");
    CHECK(hipEventDestroy(begin));
    CHECK(hipEventDestroy(end));
    const DeviceProperties& p = device_properties();
    check((p.warp_size == 32 || p.warp_size == 64) && p.multiprocessors > 0 && p.shared_bytes >= 48 << 10);
}

// ---- programmatic dependent launch

// Nothing but wait() unwraps an operand.
template <class D>
concept gives_operand = requires(D d) { d.operand; } || requires(D d) { *d; } || requires(D d) { get<0>(d); };
static_assert(gives_operand<ReadyOperands<int*>> && !gives_operand<Dependent<int*>>);
static_assert(!std::is_convertible_v<Dependent<int*>, int*>);

struct Stride {
    int64_t length;
    int8_t sign;
};
__global__ void dependent_kernel(Dependent<int*> to_, int8_t shift, Dependent<const int*> from_, float factor,
                                 Dependent<Stride> stride_, int count) {
    const auto [to, from, stride] = wait(to_, from_, stride_);
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    const int neighbour = static_cast<int>((i + stride.length) % count);
    to[i] = from[neighbour] + shift + static_cast<int>(factor) * stride.sign;
}
// Each kernel reads what the one before it has written.
TEST(dependent_launches) {
    constexpr int count = 500, launches = 40;
    std::vector<int> values(count), expected(count);
    std::iota(values.begin(), values.end(), 0);
    const Buffer<int> a(values), b(count);
    for (int k = 0; k < launches; k++) {
        int *const to = k % 2 ? a.data : b.data, *const from = k % 2 ? b.data : a.data;
        launch(Grid(2, 256, nullptr), dependent_kernel, to, int8_t{-3}, from, 5.0f, Stride{7, -2}, count);
    }
    for (int i = 0; i < count; i++) expected[i] = (i + 7 * launches) % count - launches * (3 + 5 * 2);
    check(a.read() == expected, "a chain of dependent launches");
}

// A grid's first dimension has a limit on AMD that a thread per element can pass.
TEST(large_grids) {
    const int64_t limit = device_properties().grid_threads;
    const Grid grid(static_cast<unsigned>(limit / 1024), 1024, nullptr);
    check(error_of([&] { launch(grid, tickets_kernel, nullptr, nullptr); }).find("expected fewer than") !=
          std::string::npos);
    const auto error = [](int64_t elements) {
        Context dry_run{.backend = Backend::device};
        dry_run.dry_run = true;
        float one = 0;
        const Tensor x = make_tensor(&one, DType::f32, {elements});
        const Tensor y = make_tensor(&one, DType::bf16, {elements});
        return error_of([&] {
            run(find_operation("convert"), std::vector{y, x}, std::vector<Scalar>{false}, dry_run, "naive");
        });
    };
    check(error(limit / 2).empty(), "naive takes half as many elements: " + error(limit / 2));
    check(error(limit).find("naive does not take") != std::string::npos,
          "naive takes no more: " + error(limit));
}

#if defined(LLAMAC_CPU)
// ---- what only the emulated device promises

__global__ void unwritten_kernel(float* from_struct, float* from_dynamic) {
    struct Shared {
        float values[64];
    };
    float* own = shared_memory<Shared>().values + threadIdx.x;
    float* dynamic = reinterpret_cast<float*>(dynamic_shared_memory()) + threadIdx.x;
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    from_struct[i] = *own, from_dynamic[i] = *dynamic;
    *own = *dynamic = 1;  // the next block must not see it
}
TEST(unwritten_memory) {
    const Buffer<float> a(8 * 64), b(8 * 64);
    const auto all_nan = [](const std::vector<float>& v) {
        return std::all_of(v.begin(), v.end(), [](float x) { return std::isnan(x); });
    };
    check(all_nan(a.read()), "memory is NaN until it is written");
    launch(Grid(8, 64, nullptr, 64 * sizeof(float)), unwritten_kernel, a.data, b.data);
    check(all_nan(a.read()) && all_nan(b.read()), "LDS is NaN until it is written, in each block");
}

// Lanes that have returned take no part in a warp operation, and nobody has to wait for them.
__global__ void leaving_kernel(int* out) {
    const int lane = lane_index();
    if (lane >= warp_size / 2) return;
    out[threadIdx.x] = __shfl_xor(static_cast<int>(threadIdx.x), 1);
}
TEST(leaving_lanes) {
    const Buffer<int> out(std::vector<int>(2 * warp_size, -1));
    launch(Grid(1, 2 * warp_size, nullptr), leaving_kernel, out.data);
    const std::vector<int> found = out.read();
    bool right = true;
    for (int i = 0; i < 2 * warp_size; i++) right &= found[i] == (i % warp_size < warp_size / 2 ? i ^ 1 : -1);
    check(right, "shuffles among the lanes that are left");
}

std::vector<int> tickets_in(emulation::Order order, int blocks, int threads) {
    const Buffer<int> counter(std::vector<int>{0}), tickets(blocks * threads);
    emulation::set_order(order);
    launch(Grid(blocks, threads, nullptr), tickets_kernel, counter.data, tickets.data);
    return tickets.read();
}
// The orders are what they are called: only then does a test in all three say something.
TEST(orders) {
    using emulation::Order;
    const int n = 3 * warp_size;
    std::vector<int> in_order(n);
    std::iota(in_order.begin(), in_order.end(), 0);
    const std::vector<int> backwards(in_order.rbegin(), in_order.rend());
    std::vector<int> shuffled = tickets_in(Order::shuffled, 1, n);
    check(tickets_in(Order::forward, 1, n) == in_order, "forward order");
    check(tickets_in(Order::reversed, 1, n) == backwards, "reversed order");
    check(shuffled != in_order && shuffled != backwards, "shuffled order");
    check(tickets_in(Order::shuffled, 1, n) != shuffled, "shuffled order: another one each time");
    std::sort(shuffled.begin(), shuffled.end());
    check(shuffled == in_order, "shuffled order: every lane once");
    emulation::set_order(Order::forward);
}
#endif

}  // namespace

int main(int argc, char** argv) {
    return run_device_checks(argc, argv);
}
