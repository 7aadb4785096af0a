// A 64-bit hash of a tensor's memory, which shows whether two computations gave the same bits (train/verify.h). x is the memory
// of a tensor of any storage type, seen as elements of 2 bytes: bf16 only gives their size.
//
// The memory, padded with zeros to a multiple of 16 bytes, is a row of 64-bit words w[0], w[1], .... Modulo 2^64:
//
//   hash = sum_i mix(w[i] + (i + 1) G)      mix(x) = fold(M2 fold(M1 fold(x)))      fold(x) = x xor floor(x / 2^32)
//
// G, M1 and M2 are odd. sum holds the lower and the upper 32 bits of the hash, which are exact in f64: descriptions have no
// integer of 64 bits. The arithmetic is that of integers, so the order of the terms does not matter: every variant, launch and
// number of threads gives the same bits. The hash sees
//
// - every change within one word, such as a flipped bit, with certainty. Adding (i + 1) G, multiplying by an odd number and
//   folding (its own inverse: the upper half stays) are bijections of the 64-bit numbers, so mix is one: the word's term
//   changes, and no other term does.
// - every other change with probability 1 - 2^-64, as far as mix is like a random permutation: whatever the change of the other
//   terms is, only one of 2^64 - 1 changes of the last word's term would restore the sum. This is an assumption;
//   test_operations.py flips pairs of bits. The position is in the term, so swapped words are such a change.
// - not the number of zeros at the end. Tensors of the same shape are compared.
//
// A word costs two products of 64 bits and some ten other instructions, half of the instructions that a GPU executes while 8
// bytes arrive from memory: bound by memory.
//
// reference:  one word after another.
// cpu:        words over threads.
// naive:      one block adds everything, a word per thread and turn.
// vectorized: a chunk of 128 KB and one partial sum per block, four 128-bit loads per thread in flight; a second kernel, of one
//             block, adds the partial sums.
#include <cstring>

#include "core/device.h"
#include "core/operation.h"

namespace llamac {
namespace {

__host__ __device__ inline uint64_t fold(uint64_t x) {
    return x ^ x >> 32;
}
// The term of word i.
__host__ __device__ inline uint64_t term(uint64_t word, uint64_t i) {
    const uint64_t x = fold(word + (i + 1) * 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
    return fold(fold(x) * 0x94d049bb133111ebu);
}
__host__ __device__ inline void store_halves(double* sum, uint64_t hash) {
    sum[0] = static_cast<double>(hash & 0xffffffffu);
    sum[1] = static_cast<double>(hash >> 32);
}

// The words of P elements: an even number, 16 bytes at a time.
constexpr int64_t word_count(int64_t P) {
    return (P + 7) / 8 * 2;
}
// Word i; zeros from element P on.
__host__ __device__ inline uint64_t word_at(const bf16* x, int64_t i, int64_t P) {
    uint64_t word = 0;
    for (int e = 0; e < 4; e++)
        if (4 * i + e < P) word |= uint64_t{x[4 * i + e].bits} << 16 * e;
    return word;
}

void hash_reference(View<double, 1> sum, View<const bf16, 1> x) {
    uint64_t hash = 0;
    for (int64_t i = 0; i < word_count(x.shape[0]); i++)
        hash += term(word_at(x.data, i, x.shape[0]), static_cast<uint64_t>(i));
    store_halves(sum.data, hash);
}

void hash_cpu(View<double, 1> sum, View<const bf16, 1> x) {
    const int64_t P = x.shape[0], words = word_count(P), whole = P / 4;
    const bf16* const data = x.data;
    uint64_t hash = 0;
#pragma omp parallel for simd reduction(+ : hash)
    for (int64_t i = 0; i < whole; i++) {
        uint64_t word;
        std::memcpy(&word, data + 4 * i, 8);
        hash += term(word, static_cast<uint64_t>(i));
    }
    for (int64_t i = whole; i < words; i++) hash += term(word_at(data, i, P), static_cast<uint64_t>(i));
    store_halves(sum.data, hash);
}

// ---- naive

__global__ void __launch_bounds__(max_threads_per_block)
    hash_naive_kernel(double* sum, const bf16* x, int64_t P, int64_t words) {
    struct Shared {
        uint64_t hashes[max_threads_per_block];
    };
    Shared& shared = shared_memory<Shared>();
    uint64_t hash = 0;
    for (int64_t i = threadIdx.x; i < words; i += blockDim.x)
        hash += term(word_at(x, i, P), static_cast<uint64_t>(i));
    shared.hashes[threadIdx.x] = hash;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (unsigned t = 1; t < blockDim.x; t++) hash += shared.hashes[t];
    store_halves(sum, hash);
}

void hash_naive(View<double, 1> sum, View<const bf16, 1> x, LaunchContext context) {
    launch(Grid(1, context.threads, context.stream), hash_naive_kernel, sum.data, x.data, x.shape[0],
           word_count(x.shape[0]));
}

// ---- vectorized: one partial sum per block

constexpr int loads_per_thread = 4, block_threads = 1024;
constexpr int64_t chunk_vectors = 8192;  // a block's, as in global_norm
constexpr int size = vector_size<bf16>;

// The sum over the block, in its first thread.
__device__ inline uint64_t block_hash(uint64_t hash) {
    struct Shared {
        uint64_t warps[max_warps];
    };
    Shared& shared = shared_memory<Shared>();
    for (int distance = warp_size / 2; distance > 0; distance /= 2) hash += __shfl_xor(hash, distance);
    if (lane_index() == 0) shared.warps[warp_index()] = hash;
    __syncthreads();
    hash = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / warp_size; w++) hash += shared.warps[w];
    return hash;
}

// whole: x lies at a border of 16 bytes.
template <bool whole>
__global__ void __launch_bounds__(block_threads)
    hash_vectorized_kernel(Dependent<uint64_t*> partial_, Dependent<const bf16*> x_, int64_t P) {
    const auto [partial, x] = wait(partial_, x_);
    uint64_t hash = 0;
    const auto add = [&hash](uint4 v, int64_t vector) {
        const uint64_t i = 2 * static_cast<uint64_t>(vector);
        hash += term(uint64_t{v.y} << 32 | v.x, i) + term(uint64_t{v.w} << 32 | v.z, i + 1);
    };
    const auto add_elements = [&hash, x = x, P](int64_t vector) {
        for (int64_t i = 2 * vector; i < 2 * vector + 2; i++)
            hash += term(word_at(x, i, P), static_cast<uint64_t>(i));
    };
    const int64_t vectors = (P + size - 1) / size, begin = blockIdx.x * chunk_vectors, step = blockDim.x;
    const int64_t end = begin + chunk_vectors < vectors ? begin + chunk_vectors : vectors;
    int64_t v = begin + threadIdx.x;
    if constexpr (whole) {
        const int64_t last = end < P / size ? end : P / size;  // behind it, a vector that is not full
        for (; v + (loads_per_thread - 1) * step < last; v += loads_per_thread * step) {
            uint4 bits[loads_per_thread];
#pragma unroll
            for (int k = 0; k < loads_per_thread; k++) bits[k] = load128_streaming(x + (v + k * step) * size);
#pragma unroll
            for (int k = 0; k < loads_per_thread; k++) add(bits[k], v + k * step);
        }
        for (; v < last; v += step) add(load128_streaming(x + v * size), v);
    }
    for (; v < end; v += step) add_elements(v);
    hash = block_hash(hash);
    if (threadIdx.x == 0) partial[blockIdx.x] = hash;
}

// One block.
__global__ void __launch_bounds__(block_threads)
    hash_vectorized_kernel_finish(Dependent<double*> sum_, Dependent<const uint64_t*> partial_, int count) {
    const auto [sum, partial] = wait(sum_, partial_);
    uint64_t hash = 0;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
        hash += partial[i];
    hash = block_hash(hash);
    if (threadIdx.x == 0) store_halves(sum, hash);
}

int hash_blocks(int64_t P) {
    return static_cast<int>(blocks_for(P, size * chunk_vectors));
}
int64_t hash_workspace(const Call& c) {
    return 8 * hash_blocks(c["P"]);
}

void hash_vectorized(View<double, 1> sum, View<const bf16, 1> x, LaunchContext context) {
    uint64_t* partial = static_cast<uint64_t*>(context.workspace);
    const int blocks = hash_blocks(x.shape[0]);
    launch(Grid(blocks, context.threads, context.stream),
           is_whole({x.data}, 0, size) ? hash_vectorized_kernel<true> : hash_vectorized_kernel<false>,
           partial, x.data, x.shape[0]);
    launch(Grid(1, block_threads, context.stream), hash_vectorized_kernel_finish, sum.data, partial, blocks);
}

Operation hash("hash(sum: f64[2]; x: bf16[P]) empty(P)",
               "sum = a hash of x's memory, its lower and upper 32 bits",
               {{"cpu", "words over threads", instantiations<hash_cpu>()},
                {"vectorized", "one partial sum per block, 128-bit accesses",
                 instantiations<hash_vectorized>(), nullptr, blocks_of(512, 256, 1024), hash_workspace},
                {"naive", "one block", instantiations<hash_naive>()},
                {"reference", "plain loops", instantiations<hash_reference>()}});

}  // namespace
}  // namespace llamac
