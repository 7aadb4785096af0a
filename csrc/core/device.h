// Utilities for kernels: 128-bit vectors of storage, warp and block reductions. Device code; include it only in .hip
// files.
#pragma once
#include "core/tensor.h"

namespace llamac {

constexpr int max_threads_per_block = 1024;  // on every device
constexpr int max_warps = max_threads_per_block / warp_size;

// ---- 128 bits, the widest access of a thread: four floats or eight numbers of 16 bits.
template <class T>
constexpr int vector_size = 16 / sizeof(T);

template <class T>
__device__ inline uint4 load128(const T* p) {
    return *reinterpret_cast<const uint4*>(p);
}
template <class T>
__device__ inline void store128(T* p, uint4 bits) {
    store_vector(reinterpret_cast<uint4*>(p), bits);
}
template <class T>
__device__ inline uint4 load128_streaming(const T* p) {
    return load_streaming(reinterpret_cast<const uint4*>(p));
}
template <class T>
__device__ inline void store128_streaming(T* p, uint4 bits) {
    store_streaming(reinterpret_cast<uint4*>(p), bits);
}

template <class T>
__device__ inline void unpack(uint4 bits, float (&x)[vector_size<T>]) {
    const uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
    for (int i = 0; i < 4; i++) {
        if constexpr (sizeof(T) == 4)
            x[i] = __uint_as_float(word[i]);
        else
            pair_values<T>(word[i], x[2 * i], x[2 * i + 1]);
    }
}
template <class T>
__device__ inline uint4 pack(const float (&x)[vector_size<T>]) {
    if constexpr (sizeof(T) == 4)
        return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                          __float_as_uint(x[3]));
    else
        return make_uint4(pair_bits<T>(x[0], x[1]), pair_bits<T>(x[2], x[3]), pair_bits<T>(x[4], x[5]),
                          pair_bits<T>(x[6], x[7]));
}

// vector_size elements of a row of C from element c on, zeros beyond C. whole: one access (is_whole of the operand).
template <bool whole, class T>
__device__ inline uint4 load_part(const T* row, int64_t c, int64_t C) {
    if constexpr (whole) {
        return c < C ? load128(row + c) : make_uint4(0, 0, 0, 0);
    } else {
        float x[vector_size<T>];
        for (int i = 0; i < vector_size<T>; i++) x[i] = c + i < C ? float(row[c + i]) : 0.0f;
        return pack<T>(x);
    }
}
template <bool whole, class T>
__device__ inline void store_part(T* row, int64_t c, int64_t C, uint4 bits) {
    if constexpr (whole) {
        if (c < C) store128(row + c, bits);
    } else {
        float x[vector_size<T>];
        unpack<T>(bits, x);
        for (int i = 0; i < vector_size<T>; i++)
            if (c + i < C) row[c + i] = T(x[i]);
    }
}

// ---- fp8: four at once
template <class F>
__device__ inline uint32_t pack_fp8(const float* x) {
    if constexpr (converts_fp8<F>) {
        return fp8_word<F>(x);
    } else {
        uint32_t word = 0;
        for (int i = 0; i < 4; i++) word |= static_cast<uint32_t>(F(x[i]).bits) << 8 * i;
        return word;
    }
}

// ---- reductions, the same order of additions in every run
__device__ inline int lane_index() {
    return static_cast<int>(threadIdx.x) % warp_size;
}
__device__ inline int warp_index() {
    return static_cast<int>(threadIdx.x) / warp_size;
}

__device__ inline float warp_sum(float value) {
    for (int distance = warp_size / 2; distance > 0; distance /= 2) value += __shfl_xor(value, distance);
    return value;
}
__device__ inline float warp_max(float value) {
    for (int distance = warp_size / 2; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor(value, distance));
    return value;
}

// The sum over the block, in every thread. Blocks of whole warps, in x alone. warps[max_warps]: LDS that stays unused until
// the next barrier.
__device__ inline float block_sum(float value, float* warps) {
    value = warp_sum(value);
    if (lane_index() == 0) warps[warp_index()] = value;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / warp_size; w++) sum += warps[w];
    return sum;
}
__device__ inline float block_max(float value, float* warps) {
    value = warp_max(value);
    if (lane_index() == 0) warps[warp_index()] = value;
    __syncthreads();
    float largest = warps[0];
    for (int w = 1; w < static_cast<int>(blockDim.x) / warp_size; w++) largest = fmaxf(largest, warps[w]);
    return largest;
}

// ---- operands
// Where the rows [N,C] of a strided operand lie.
template <class T>
struct Rows {
    T* data;
    int64_t stride;

    __device__ T* at(int64_t n) const { return data + n * stride; }
};
template <class T>
Rows<T> rows(const View<T, 2>& x) {
    return {x.data, x.stride[0]};
}

// Where the heads [B,T,NH,HD] of a strided operand lie.
template <class T>
struct Heads {
    T* data;
    int64_t stride_b, stride_t, stride_h;

    __device__ T* at(int64_t b, int64_t t, int64_t h) const {
        return data + b * stride_b + t * stride_t + h * stride_h;
    }
};
template <class T>
Heads<T> heads(const View<T, 4>& x) {
    return {x.data, x.stride[0], x.stride[1], x.stride[2]};
}

// Whether contiguous rows of C elements at these addresses are whole 128-bit vectors of `size` elements. Null counts as whole.
inline bool is_whole(std::initializer_list<const void*> data, int64_t C, int size) {
    bool whole = C % size == 0;
    for (const void* p : data) whole &= reinterpret_cast<uintptr_t>(p) % 16 == 0;
    return whole;
}

}  // namespace llamac
