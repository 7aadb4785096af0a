// The untyped Tensor, which files exchange, and the typed View, which the host side of a kernel reads.
//
// Dimension letters, everywhere: B batch, T time, C channels, NH query heads, NKV key/value heads, HD head
// size, F feed-forward width, V vocabulary, L layers, N = B*T rows.
#pragma once
#include "core/dtype.h"

namespace llamac {

// data, dtype, shape and strides in elements. data == nullptr: an operand that was left out.
struct Tensor {
    static constexpr int max_rank = 4;
    void* data = nullptr;
    DType dtype = DType::f32;
    int rank = 0;
    int64_t shape[max_rank] = {};
    int64_t stride[max_rank] = {};

    int64_t elements() const {
        int64_t n = 1;
        for (int d = 0; d < rank; d++) n *= shape[d];
        return n;
    }
    int64_t bytes() const { return elements() * size_of(dtype); }
    bool contiguous() const {
        int64_t expected = 1;
        for (int d = rank - 1; d >= 0; expected *= shape[d--])
            if (shape[d] != 1 && stride[d] != expected) return false;
        return true;
    }
    template <class T>
    T* as() const {
        CHECK(dtype == dtype_of<T>());
        return static_cast<T*>(data);
    }
};

// A contiguous, row-major tensor over memory of another owner.
inline Tensor make_tensor(void* data, DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t;
    t.data = data;
    t.dtype = dtype;
    CHECK(shape.size() <= Tensor::max_rank);
    for (int64_t size : shape) t.shape[t.rank++] = size;
    int64_t stride = 1;
    for (int d = t.rank - 1; d >= 0; stride *= t.shape[d--]) t.stride[d] = stride;
    return t;
}

// Type and shape without memory.
inline Tensor shaped(DType dtype, std::initializer_list<int64_t> shape) {
    return make_tensor(nullptr, dtype, shape);
}

// The same memory under another shape of as many elements. Contiguous tensors only.
inline Tensor reshape(const Tensor& t, std::initializer_list<int64_t> shape) {
    const Tensor r = make_tensor(t.data, t.dtype, shape);
    CHECK(t.contiguous() && r.elements() == t.elements());
    return r;
}

// A launcher's operand, with checked element type and rank; x(n, c) is an element.
template <class T, int R>
struct View {
    T* data;
    int64_t shape[R ? R : 1], stride[R ? R : 1];  // C++ has no empty arrays

    __host__ __device__ explicit operator bool() const { return data != nullptr; }
    // An output that the next step of the same call reads.
    template <class U, std::enable_if_t<std::is_same_v<U, const T>, int> = 0>
    operator View<U, R>() const {
        View<U, R> v{data, {}, {}};
        for (int d = 0; d < R; d++) v.shape[d] = shape[d], v.stride[d] = stride[d];
        return v;
    }
    template <class... Index>
    __host__ __device__ T& operator()(Index... index) const {
        static_assert(sizeof...(Index) == R, "one index a dimension");
        const int64_t i[R + 1] = {static_cast<int64_t>(index)...};
        int64_t offset = 0;
        for (int d = 0; d < R; d++) offset += i[d] * stride[d];
        return data[offset];
    }
};

inline std::string shape_text(const int64_t* shape, int rank) {
    std::string text = "[";
    for (int d = 0; d < rank; d++) text += (d ? "," : "") + std::to_string(shape[d]);
    return text + "]";
}

}  // namespace llamac
