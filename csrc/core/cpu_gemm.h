// Matrix products on the host.
//
// gemm() is a packed product as described by Goto and van de Geijn (Anatomy of High-Performance Matrix
// Multiplication, 2008): B is copied into panels a few vectors wide, a tile of C stays in registers over the loop on
// K, and the block sizes fit the caches. GCC's vector extensions keep it portable. gemm_tile() is its register tile,
// which attention also calls for its own small blocks.
#pragma once
#include "core/scratch.h"
#include "core/tensor.h"

namespace llamac {

// tile_rows * tile_vectors sums, tile_vectors of B and one spare fit the registers: 32 with AVX-512, else 16.
#if defined(__AVX512F__)
constexpr int vector_bytes = 64, tile_rows = 8, tile_vectors = 3;
#elif defined(__AVX__)
constexpr int vector_bytes = 32, tile_rows = 4, tile_vectors = 3;
#else
constexpr int vector_bytes = 16, tile_rows = 4, tile_vectors = 3;
#endif

template <class A>
struct VectorOf {  // aligned as its elements: unaligned loads and stores
    typedef A type __attribute__((vector_size(vector_bytes), aligned(sizeof(A)), may_alias));
};
template <class A>
using vector = typename VectorOf<A>::type;
template <class A>
constexpr int64_t lanes = vector_bytes / static_cast<int64_t>(sizeof(A));

template <class A>
inline vector<A> load(const A* from) {
    return *reinterpret_cast<const vector<A>*>(from);
}
template <class A>
inline void store(A* to, vector<A> v) {
    *reinterpret_cast<vector<A>*>(to) = v;
}

// c[tile_rows, NV vectors] = initial + a[tile_rows, K] * b[K, NV vectors]. Element (i, k) of a is
// a[i * a_row + k * a_k]; rows of b, initial and c lie b_row, initial_row, c_row elements apart.
// initial: null is zero, and may be c.
template <int NV, class A>
inline void gemm_tile(int64_t K, const A* a, int64_t a_row, int64_t a_k, const A* b, int64_t b_row,
                      const A* initial, int64_t initial_row, A* c, int64_t c_row) {
    using V = vector<A>;
    constexpr int64_t L = lanes<A>;
    V sum[tile_rows][NV] = {};
    for (int i = 0; i < tile_rows; i++)  // c comes from memory while the sums are made: +6% on wide matrices
        for (int j = 0; j < NV; j++) __builtin_prefetch(c + i * c_row + j * L, 1);
#pragma GCC unroll 1
    for (int64_t k = 0; k < K; k++) {
        V row[NV];
        for (int j = 0; j < NV; j++) row[j] = load(b + k * b_row + j * L);
#pragma GCC unroll 8
        for (int i = 0; i < tile_rows; i++) {
            const A x = a[i * a_row + k * a_k];
            for (int j = 0; j < NV; j++) sum[i][j] += x * row[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < tile_rows; i++)
        for (int j = 0; j < NV; j++) {
            if (initial) sum[i][j] += load(initial + i * initial_row + j * L);
            store(c + i * c_row + j * L, sum[i][j]);
        }
}

// Element (i, j) is data[i * row + j * column]; one of the two steps is 1.
template <class T>
struct Matrix {
    const T* data;
    int64_t row, column;

    const T& operator()(int64_t i, int64_t j) const { return data[i * row + j * column]; }
    Matrix from(int64_t i, int64_t j) const { return {data + i * row + j * column, row, column}; }
    Matrix transposed() const { return {data, column, row}; }
};

// c[M,N] = initial + a[M,K] * b[K,N]; rows of c and of initial are N long and contiguous; initial: null is
// zero, and may be c. All OpenMP threads take part; the result does not depend on their number. Instantiated for A = float
// with T = float, bf16 or fp16, and for double.
template <class A, class T>
void gemm(int64_t M, int64_t N, int64_t K, Matrix<T> a, Matrix<T> b, const A* initial, A* c);

}  // namespace llamac
