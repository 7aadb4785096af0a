// Matrix products on the host.
//
// gemm() is a packed product in the manner of Goto and van de Geijn (2008): B is copied into panels a few vectors wide,
// a tile of C stays in registers while K runs, and blocks of A and B are sized for the caches. GCC's vector extensions
// keep it portable; gemm_tile() is its register tile, which attention also calls on its own small blocks.
// cblas_gemm() is the system's BLAS, where the build found one (LLAMAC_CBLAS).
#pragma once
#include <cstdlib>
#include <new>

#include "core/tensor.h"

namespace llamac {

// Register tile: tile_rows x tile_vectors accumulators, tile_vectors of B and one spare must fit the register file
// (32 vectors with AVX-512, 16 with AVX2).
#ifdef __AVX512F__
constexpr int vector_bytes = 64, tile_rows = 8, tile_vectors = 3;
#else
constexpr int vector_bytes = 32, tile_rows = 4, tile_vectors = 3;
#endif

// Unaligned loads and stores: the alignment is the element's.
template <class A>
struct VectorOf {
    typedef A type __attribute__((vector_size(vector_bytes), aligned(sizeof(A)), may_alias));
};
template <class A>
using vector = typename VectorOf<A>::type;
template <class A>
constexpr int64_t lanes = vector_bytes / static_cast<int64_t>(sizeof(A));

// C[tile_rows, NV vectors] = initial + A[tile_rows, K] * B[K, NV vectors]. A's element (i, k) is a[i * a_row + k * a_k];
// rows of B, C and initial are b_row, c_row and initial_row elements apart. initial: null is zero, and may be c.
template <int NV, class A>
inline void gemm_tile(int64_t K, const A* a, int64_t a_row, int64_t a_k, const A* b, int64_t b_row, const A* initial,
                      int64_t initial_row, A* c, int64_t c_row) {
    using V = vector<A>;
    constexpr int64_t L = lanes<A>;
    V sum[tile_rows][NV] = {};
    for (int i = 0; i < tile_rows; i++)
        for (int j = 0; j < NV; j++) __builtin_prefetch(c + i * c_row + j * L, 1);
#pragma GCC unroll 1
    for (int64_t k = 0; k < K; k++) {
        V row[NV];
        for (int j = 0; j < NV; j++) row[j] = *reinterpret_cast<const V*>(b + k * b_row + j * L);
#pragma GCC unroll 8
        for (int i = 0; i < tile_rows; i++) {
            const V x = V{} + a[i * a_row + k * a_k];
            for (int j = 0; j < NV; j++) sum[i][j] += x * row[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < tile_rows; i++)
        for (int j = 0; j < NV; j++) {
            if (initial) sum[i][j] += *reinterpret_cast<const V*>(initial + i * initial_row + j * L);
            *reinterpret_cast<V*>(c + i * c_row + j * L) = sum[i][j];
        }
}

// Memory that is kept between calls: aligned to 64 bytes, grows, is not cleared.
struct Scratch {
    void* data = nullptr;
    size_t bytes = 0;

    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(data); }
    template <class T>
    T* reserve(int64_t elements) {
        const size_t wanted = (static_cast<size_t>(elements) * sizeof(T) + 63) / 64 * 64;
        if (wanted > bytes) {
            std::free(data);
            data = std::aligned_alloc(64, wanted);
            bytes = data ? wanted : 0;
            if (!data) throw std::bad_alloc();
        }
        return static_cast<T*>(data);
    }
};

// Element (i, j) is data[i * row + j * column]: either step may be 1, so a transpose is a swap of the two.
template <class T>
struct Matrix {
    const T* data;
    int64_t row, column;

    const T& operator()(int64_t i, int64_t j) const { return data[i * row + j * column]; }
    Matrix transposed() const { return {data, column, row}; }
};

// C[M,N] = initial + A[M,K] * B[K,N]. Rows of C and of initial are c_row and initial_row elements apart; initial: null
// is zero, and may be c. All OpenMP threads work; the result does not depend on how many there are.
// Instantiated for A = float with T = float or bf16, and for double.
template <class A, class T>
void gemm(int64_t M, int64_t N, int64_t K, Matrix<T> a, Matrix<T> b, const A* initial, int64_t initial_row, A* c,
          int64_t c_row);

}  // namespace llamac
