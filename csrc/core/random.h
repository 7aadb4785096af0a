// Philox4x32-10, a counter-based random number generator: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2,
// 3", SC11. The same (seed, step, stream, element) gives the same bits on every device and with any number of
// threads.
#pragma once
#include <cmath>

#include "core/dtype.h"
#include "platform/hip.h"

namespace llamac {

struct Philox {
    uint32_t bits[4];
};

// Streams: parameter k has 4k; sampling has the last one.
constexpr uint32_t sampling_stream = 0xffffffffu;

__host__ __device__ inline Philox philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
        c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(p1);
        c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// The 4 x 32 random bits of elements 4*block .. 4*block+3.
__host__ __device__ inline Philox random_block(uint64_t seed, uint32_t step, uint32_t stream, int64_t block) {
    return philox(seed, static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), stream, step);
}

// In (0, 1): never 0, so that its logarithm is finite.
__host__ __device__ inline double uniform(uint32_t bits) {
    return (bits + 0.5) * (1.0 / 4294967296.0);
}

// Standard normal numbers of elements 4*block .. 4*block+3: Box and Muller on 2 x 32 bits, in double, rounded to float.
struct Normals {
    float values[4];
};
inline Normals random_normals(uint64_t seed, uint32_t step, uint32_t stream, int64_t block) {
    const Philox p = random_block(seed, step, stream, block);
    Normals normals;
    for (int i = 0; i < 4; i += 2) {
        const double radius = sqrt(-2.0 * log(uniform(p.bits[i])));
        const double angle = 6.283185307179586476925286766559 * uniform(p.bits[i + 1]);
        normals.values[i] = static_cast<float>(radius * cos(angle));
        normals.values[i + 1] = static_cast<float>(radius * sin(angle));
    }
    return normals;
}
// Of one element.
inline float random_normal(uint64_t seed, uint32_t step, uint32_t stream, int64_t element) {
    return random_normals(seed, step, stream, element / 4).values[element % 4];
}

// out: `count` numbers of a floating-point type; deviation times the standard normal numbers of step 0, from element `first`
// on, computed by all threads of the host.
void fill_normal(void* out, DType dtype, int64_t count, float deviation, uint64_t seed, uint32_t stream,
                 int64_t first);

}  // namespace llamac
