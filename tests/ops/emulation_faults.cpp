// emulation_faults NAME runs one kernel that is wrong on purpose. tests/ops/test_platform.py says which build has
// to see it, and how: the emulated device itself, plain arithmetic beside it (exit status 1), or a sanitizer.
// `none` and the kernels that a wrong one is made from are right, and must pass everywhere.
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "core/device.h"
#include "core/device_memory.h"
#include "platform/tile.h"

using namespace llamac;

namespace {

constexpr int threads = 2 * warp_size, blocks = 3;

struct Row {
    float x[threads];
};
__device__ float* dynamic_row() {
    return reinterpret_cast<float*>(dynamic_shared_memory());
}
__device__ int neighbour() {
    return (static_cast<int>(threadIdx.x) + threads - 1) % threads;
}

// ---- barriers

// Each element from its left neighbour, twice. A barrier between writing and reading, and one between reading
// and writing again.
template <bool first_barrier, bool second_barrier>
__global__ void neighbours_kernel(const float* in, float* out) {
    Row& s = shared_memory<Row>();
    const int t = static_cast<int>(threadIdx.x), i = static_cast<int>(blockIdx.x) * threads + t;
    s.x[t] = in[i];
    if constexpr (first_barrier) __syncthreads();
    float sum = t > 0 ? s.x[t - 1] : 0.0f;
    if constexpr (second_barrier) __syncthreads();
    s.x[t] = 2 * in[i];
    __syncthreads();
    sum += s.x[neighbour()];
    out[i] = sum;
}
__global__ void divergent_barrier_kernel(const float* in, float* out) {
    Row& s = shared_memory<Row>();
    const unsigned t = threadIdx.x;
    s.x[t] = in[blockIdx.x * threads + t];
    if (t < threads / 2) {  // NOLINT(bugprone-branch-clone): two barriers, which is the fault
        __syncthreads();
    } else {
        __syncthreads();
    }
    out[blockIdx.x * threads + t] = s.x[neighbour()];
}
__global__ void half_barrier_kernel(const float* in, float* out) {
    Row& s = shared_memory<Row>();
    const unsigned t = threadIdx.x;
    s.x[t] = in[blockIdx.x * threads + t];
    if (t < threads / 2) __syncthreads();
    out[blockIdx.x * threads + t] = s.x[t];
}
__global__ void barrier_after_return_kernel(const float* in, float* out) {
    Row& s = shared_memory<Row>();
    const unsigned t = threadIdx.x;
    if (t >= warp_size) return;
    s.x[t] = in[blockIdx.x * threads + t];
    __syncthreads();
    out[blockIdx.x * threads + t] = s.x[t];
}

// ---- warp operations

// Lane 0 of each warp passes on what it has by LDS: a shuffle is no barrier.
__global__ void shuffle_as_barrier_kernel(const float* in, float* out) {
    Row& s = shared_memory<Row>();
    const int t = static_cast<int>(threadIdx.x), i = static_cast<int>(blockIdx.x) * threads + t;
    s.x[t] = in[i];
    const float left = __shfl_xor(in[i], 1);
    out[i] = left + s.x[t ^ 1];
}
__global__ void wave32_reduction_kernel(const float* in, float* out) {
    float sum = in[blockIdx.x * threads + threadIdx.x];
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor(sum, distance);
    out[blockIdx.x * threads + threadIdx.x] = sum;
}
__global__ void divergent_shuffle_kernel(const float* in, float* out) {
    float x = in[blockIdx.x * threads + threadIdx.x];
    if (lane_index() < warp_size / 2) x += __shfl_xor(x, 1);
    out[blockIdx.x * threads + threadIdx.x] = warp_sum(x);
}
__global__ void inactive_lane_shuffle_kernel(const float* in, float* out) {
    const int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x;
    if (lane_index() >= warp_size / 2) return;
    out[i] = __shfl_xor(in[i], warp_size / 2);
}

// ---- memory

__global__ void lds_overrun_kernel(const float* in, float* out) {
    Row& s = shared_memory<Row>();
    float* x = s.x;  // an index that no compiler checks
    const unsigned t = threadIdx.x;
    x[t + 1] = in[blockIdx.x * threads + t];
    __syncthreads();
    out[blockIdx.x * threads + t] = x[t + 1];
}
__global__ void dynamic_lds_overrun_kernel(const float* in, float* out) {
    float* x = dynamic_row();
    const unsigned t = threadIdx.x;
    x[t + 1] = in[blockIdx.x * threads + t];
    __syncthreads();
    out[blockIdx.x * threads + t] = x[t + 1];
}
__global__ void memory_overrun_kernel(const float* in, float* out) {
    const unsigned i = blockIdx.x * threads + threadIdx.x;
    out[i] = in[i] + 0 * in[i + 1];
}
__global__ void uninitialised_lds_kernel(const float* in, float* out) {
    Row& s = shared_memory<Row>();
    const unsigned t = threadIdx.x, i = blockIdx.x * threads + t;
    if (t > 0) s.x[t] = in[i];
    __syncthreads();
    out[i] = s.x[neighbour()];
}
__global__ void uninitialised_memory_kernel(const float* in, float* out) {
    const unsigned i = blockIdx.x * threads + threadIdx.x;
    out[i] += in[i];
}
__global__ void misaligned_kernel(const float* in, float* out) {
    const int t = static_cast<int>(threadIdx.x), i = static_cast<int>(blockIdx.x) * threads + t;
    if (t % 4 == 0 && t + 4 < threads) store128(out + i + 1, load128(in + i + 1));
    if (t == 0 || t > threads - 4) out[i] = in[i];
}
// All blocks write one element.
__global__ void shared_output_kernel(const float* in, float* out) {
    const unsigned i = blockIdx.x * threads + threadIdx.x;
    out[i] = in[i];
    if (threadIdx.x == blockIdx.x) out[0] = in[0];
}

// ---- matrix cores: tiles of LDS, products

// The block's row as a tile, twice. A barrier between a copy and its readers, and one between them and the next.
constexpr int tile_columns = 32, tile_words = tile_columns / 2;
template <bool ended, bool second_barrier>
__global__ void copied_tile_kernel(const float* in, float* out) {
    const SharedTile<tile_columns> tile{dynamic_shared_memory()};
    const bf16* row = reinterpret_cast<const bf16*>(in + blockIdx.x * threads);
    TileCopy<threads / tile_words, tile_columns, threads> copy;
    const int n = neighbour();
    float sum = 0;
    for (int repeat = 0; repeat < 2; repeat++) {
        copy.begin(tile, row, tile_columns, threads / tile_words);
        if (ended) copy.end();
        __syncthreads();
        float word;
        std::memcpy(&word, tile.at(n / tile_words, n % tile_words / 4) + n % 4 * 4, sizeof word);
        sum += word;
        if (!ended) copy.end();
        if (second_barrier) __syncthreads();
    }
    out[blockIdx.x * threads + threadIdx.x] = sum;
}
// A product of zeros, which changes nothing, by the first `lanes` of each warp.
template <int lanes, bool others_return>
__global__ void product_kernel(const float* in, float* out) {
    using T = Tile;
    const int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x;
    T::Accumulator sums = {};
    if (lane_index() < lanes)
        T::multiply<bf16>(sums, T::Operand{}, T::Operand{});
    else if (others_return)
        return;
    out[i] = in[i] + warp_sum(sums.x[0]);
}

// ---- what right kernels would give: the value of element i of the row that its block has

using Expected = float (*)(const float* row, int i);
float left_twice(const float* row, int i) {
    return (i > 0 ? row[i - 1] : 0.0f) + 2 * row[(i + threads - 1) % threads];
}
float left(const float* row, int i) {
    return row[(i + threads - 1) % threads];
}
float twice_left(const float* row, int i) {
    return 2 * left(row, i);
}
float itself(const float* row, int i) {
    return row[i];
}
float pair_sum(const float* row, int i) {
    return 2 * row[i ^ 1];
}
float sum_of_warp(const float* row, int i) {
    const float* warp = row + i / warp_size * warp_size;
    return std::accumulate(warp, warp + warp_size, 0.0f);
}

struct Fault {
    const char* name;
    void (*kernel)(const float*, float*);
    Expected expected;
};
const Fault faults[] = {
    {"none", neighbours_kernel<true, true>, left_twice},
    {"missing-barrier", neighbours_kernel<false, true>, left_twice},
    {"missing-second-barrier", neighbours_kernel<true, false>, left_twice},
    {"divergent-barrier", divergent_barrier_kernel, left},
    {"half-barrier", half_barrier_kernel, itself},
    {"barrier-after-return", barrier_after_return_kernel, itself},
    {"shuffle-as-barrier", shuffle_as_barrier_kernel, pair_sum},
    {"wave32-reduction", wave32_reduction_kernel, sum_of_warp},
    {"divergent-shuffle", divergent_shuffle_kernel, sum_of_warp},
    {"inactive-lane-shuffle", inactive_lane_shuffle_kernel, itself},
    {"lds-overrun", lds_overrun_kernel, itself},
    {"dynamic-lds-overrun", dynamic_lds_overrun_kernel, itself},
    {"memory-overrun", memory_overrun_kernel, itself},
    {"uninitialised-lds", uninitialised_lds_kernel, left},
    {"uninitialised-memory", uninitialised_memory_kernel, itself},
    {"misaligned-access", misaligned_kernel, itself},
    {"shared-output", shared_output_kernel, itself},
    {"copied-tile", copied_tile_kernel<true, true>, twice_left},
    {"unfinished-copy", copied_tile_kernel<false, true>, twice_left},
    {"copy-over-readers", copied_tile_kernel<true, false>, twice_left},
    {"product", product_kernel<warp_size, false>, itself},
    {"divergent-product", product_kernel<warp_size / 2, false>, itself},
    {"product-after-return", product_kernel<warp_size / 2, true>, itself},
};

// In which of the three orders the result is wrong; prints it.
bool wrong_in(const Fault& fault, emulation::Order order, const char* order_name) {
    std::vector<float> in(blocks * threads), out(in.size());
    for (size_t i = 0; i < in.size(); i++) in[i] = static_cast<float>(i * 37 % 101);
    const DeviceMemory input(in.size() * sizeof(float)), output(in.size() * sizeof(float));
    copy_bytes(input.data, in.data(), input.bytes);
    emulation::set_order(order);
    launch(Grid(blocks, threads, nullptr, threads * sizeof(float)), fault.kernel,
           static_cast<const float*>(input.data), static_cast<float*>(output.data));
    copy_bytes(out.data(), output.data, output.bytes);
    for (int i = 0; i < blocks * threads; i++) {
        const float expected = fault.expected(&in[i / threads * threads], i % threads);
        if (out[i] == expected) continue;
        std::printf("%s: wrong in %s order: element %d is %g, expected %g\n", fault.name, order_name, i,
                    double(out[i]), double(expected));
        return true;
    }
    return false;
}

}  // namespace

int main(int argc, char** argv) {
    using emulation::Order;
    for (const Fault& fault : faults) {
        if (argc != 2 || std::strcmp(argv[1], fault.name) != 0) continue;
        bool wrong = wrong_in(fault, Order::forward, "forward");
        wrong |= wrong_in(fault, Order::reversed, "reversed");
        wrong |= wrong_in(fault, Order::shuffled, "shuffled");
        return wrong;
    }
    std::fprintf(stderr, "emulation_faults: expected NAME, one of");
    for (const Fault& fault : faults) std::fprintf(stderr, " %s", fault.name);
    std::fprintf(stderr, "\n");
    return 2;
}
