// The table of RoPE's angles (Su et al., "RoFormer", 2021).
//
//   cis[t,j] = attention_factor * (cos, sin)(t * frequency[j]),   j < HD/2
//
// frequency: radians per position of each pair, theta^(-2j/HD) or its scaled form (rope_frequencies() in model/config.cpp).
// attention_factor: YaRN's; 1 for all others.
//
// Angles reach t itself (frequency 1), where a float keeps only 0.008 rad at t = 131,072: they are computed in double, and only
// their cosine and sine are rounded.
//
// reference:  plain loops in double.
// naive:      one thread per pair, its cosine and sine in double.
// vectorized: 128-bit accesses: a thread has two pairs at every k-th position. Double only takes an angle to the nearest quarter
//             turn; the rest is done in float.
//
// Measured: docs/benchmarks/nvidia-h200.md.
#include <algorithm>
#include <cmath>

#include "core/device.h"
#include "core/operation.h"

namespace llamac {
namespace {

template <class A>
void precompute_cis_reference(View<A, 3> cis, View<const double, 1> frequency, double attention_factor) {
    const int64_t T = cis.shape[0], half = cis.shape[1];
#pragma omp parallel for
    for (int64_t j = 0; j < half; j++)
        for (int64_t t = 0; t < T; t++) {
            const double angle = static_cast<double>(t) * frequency(j);
            cis(t, j, 0) = A(attention_factor * std::cos(angle));
            cis(t, j, 1) = A(attention_factor * std::sin(angle));
        }
}

// ---- naive

__global__ void precompute_cis_naive_kernel(float* cis, const double* frequency, int64_t T, int64_t half,
                                            double attention_factor) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= T * half) return;
    const double angle = static_cast<double>(i / half) * frequency[i % half];
    cis[2 * i] = static_cast<float>(attention_factor * cos(angle));
    cis[2 * i + 1] = static_cast<float>(attention_factor * sin(angle));
}

void precompute_cis_naive(View<float, 3> cis, View<const double, 1> frequency, double attention_factor,
                          LaunchContext context) {
    const int64_t T = cis.shape[0], half = cis.shape[1];
    launch(context.grid(T * half), precompute_cis_naive_kernel, cis.data, frequency.data, T, half,
           attention_factor);
}

// ---- vectorized: two pairs of many positions per thread

constexpr int block_threads = 512;  // at most

// Cosine and sine of quarters * pi/2. Whole quarter turns only swap and negate them; the rest, at most half a
// quarter turn, loses nothing in double and 2^-24 of itself in float.
__device__ inline void cosine_sine(double quarters, float& c, float& s) {
    const double nearest = rint(quarters);
    float sine, cosine;
    sincospif(0.5f * static_cast<float>(quarters - nearest), &sine, &cosine);
    const int quadrant = static_cast<int>(static_cast<int64_t>(nearest) & 3);
    c = quadrant & 1 ? sine : cosine;
    s = quadrant & 1 ? cosine : sine;
    if (quadrant == 1 || quadrant == 2) c = -c;
    if (quadrant >= 2) s = -s;
}

// threadIdx.x and blockIdx.y: which two pairs; threadIdx.y and blockIdx.x: the first position.
template <bool whole>
__global__ void __launch_bounds__(block_threads)
    precompute_cis_vectorized_kernel(Dependent<float*> cis_, Dependent<const double*> frequency_, int64_t T,
                                     int64_t half, float attention_factor) {
    const auto [cis, frequency] = wait(cis_, frequency_);
    constexpr double two_over_pi = 0.63661977236758134307553505349006;
    const int64_t j = 2 * (int64_t{blockIdx.y} * blockDim.x + threadIdx.x);
    double quarters[2];  // from one position to the next
    for (int i = 0; i < 2; i++) quarters[i] = j + i < half ? two_over_pi * frequency[j + i] : 0;
    const int64_t step = int64_t{gridDim.x} * blockDim.y;
    for (int64_t t = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; t < T; t += step) {
        float turn[4];
        for (int i = 0; i < 2; i++)
            cosine_sine(static_cast<double>(t) * quarters[i], turn[2 * i], turn[2 * i + 1]);
        for (float& part : turn) part *= attention_factor;
        store_part<whole>(cis + t * 2 * half, 2 * j, 2 * half, pack<float>(turn));
    }
}

void precompute_cis_vectorized(View<float, 3> cis, View<const double, 1> frequency, double attention_factor,
                               LaunchContext context) {
    const int64_t T = cis.shape[0], half = cis.shape[1], columns = (half + 1) / 2;
    const unsigned across = static_cast<unsigned>(std::min<int64_t>(columns, context.threads));
    const unsigned down = static_cast<unsigned>(context.threads) / across;
    // No more positions at once than keep the device busy: every thread has to read its frequencies.
    const int64_t resident =
        int64_t{device_properties().multiprocessors} * max_threads_per_block / context.threads;
    const unsigned places = static_cast<unsigned>(std::min<int64_t>(blocks_for(T, down), resident));
    const dim3 blocks(places, blocks_for(columns, across));
    launch(Grid(blocks, dim3(across, down), context.stream),
           is_whole({cis.data}, 2 * half, vector_size<float>) ? precompute_cis_vectorized_kernel<true>
                                                              : precompute_cis_vectorized_kernel<false>,
           cis.data, frequency.data, T, half, static_cast<float>(attention_factor));
}

Operation precompute_cis(
    "precompute_cis<A: f32 f64>"
    "(cis: A[T,HD/2,2]; frequency: f64[HD/2]; attention_factor: float = 1 {1, 1.25}) empty(T)",
    "cosine and sine of every position's RoPE angles",
    {{"vectorized", "angles reduced in double, 128-bit accesses", instantiations<precompute_cis_vectorized>(),
      nullptr, blocks_of(256, 128, block_threads)},
     {"naive", "one thread per pair", instantiations<precompute_cis_naive>()},
     {"reference", "plain loops in double",
      instantiations<precompute_cis_reference<float>, precompute_cis_reference<double>>()}},
    [](const Call& c) { return 1.5 * c["T"] * c["HD"]; });

}  // namespace
}  // namespace llamac
