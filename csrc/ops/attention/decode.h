// Shared by the variants of attention_decode: the positions that the next token of a sequence sees, the operands of the kernels,
// and the variant of decode_vectorized.hip.
#pragma once
#include "core/device.h"
#include "core/operation.h"

namespace llamac {

// Where heads [B,NH,HD] lie.
template <class T>
struct RowHeads {
    T* data;
    int64_t stride_b, stride_h;

    __device__ T* at(int64_t b, int64_t h) const { return data + b * stride_b + h * stride_h; }
};
template <class T>
RowHeads<T> row_heads(const View<T, 3>& x) {
    return {x.data, x.stride[0], x.stride[1]};
}

// The next token of a sequence sees positions [from, end] of the cache; `rotary` is its own.
struct DecodePlace {
    int64_t from, end, rotary;

    __host__ __device__ DecodePlace(const int32_t* begins, const int32_t* ends, int64_t b, int64_t S,
                                    int64_t window) {
        const int64_t last = ends[0], first = begins[b];
        end = last < 0 ? 0 : last < S ? last : S - 1;
        const int64_t begin = first < 0 ? 0 : first < end ? first : end;
        rotary = end - begin;
        from = window > 0 && end - window + 1 > begin ? end - window + 1 : begin;
    }
};

// The operands as the kernels get them.
template <class T>
struct DecodeOperands {
    RowHeads<T> out;
    Heads<T> keys, values;
    RowHeads<const T> q, k, v;
    const float* cis;
    const int32_t *begin, *end;
};

Variant vectorized_attention_decode();  // decode_vectorized.hip

}  // namespace llamac
