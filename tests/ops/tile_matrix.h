// What check_tile.cpp compares: matrices on the host, and their way into LDS and back.
#pragma once
#include <cmath>

#include "device_check.h"
#include "platform/tile.h"

namespace llamac {

constexpr int warps = 2;  // of a block: the second has other indices and the same lanes
inline int block_threads() {
    return warps * device_warp();
}

template <class T>
std::string text(T value) {
    return std::to_string(value);
}

// ---- matrices on the host, row by row

template <class T>
struct Matrix {
    int rows, columns;
    std::vector<T> values = std::vector<T>(static_cast<size_t>(rows) * columns, T(NAN));

    T& operator()(int row, int column) { return values[static_cast<size_t>(row) * columns + column]; }
    const T& operator()(int row, int column) const {
        return values[static_cast<size_t>(row) * columns + column];
    }
};
// -4 to 4; `seed` tells matrices of a check apart.
template <class T>
Matrix<T> integers(int rows, int columns, uint32_t seed) {
    Matrix<T> matrix{rows, columns};
    uint32_t state = seed * 2654435761u + 1;
    for (T& value : matrix.values) {
        state = state * 1664525u + 1013904223u;
        value = T(static_cast<float>((state >> 16) % 9) - 4.0f);
    }
    return matrix;
}
template <class T>
Matrix<T> result(const Buffer<T>& buffer, int rows, int columns) {
    return {rows, columns, buffer.read()};
}
template <class T>
void same(const Matrix<T>& found, const Matrix<T>& expected, const std::string& what) {
    for (int m = 0; m < expected.rows; m++)
        for (int n = 0; n < expected.columns; n++)
            if (!(float(found(m, n)) == float(expected(m, n)))) {
                check(false, what + ": row " + text(m) + ", column " + text(n) + " is " +
                                 text(float(found(m, n))) + ", expected " + text(float(expected(m, n))));
                return;
            }
    check(true, what);
}

// ---- pieces of kernels

// All threads of the block; then everybody may read.
template <class E, int columns>
__device__ void fill(SharedTile<columns> to, const E* from, int rows) {
    constexpr int chunks = SharedTile<columns>::chunks;
    for (int i = static_cast<int>(threadIdx.x); i < rows * chunks; i += static_cast<int>(blockDim.x))
        *reinterpret_cast<uint4*>(to.at(i / chunks, i % chunks)) = load128(from + i * 8);
    __syncthreads();
}
template <class E, int columns>
__device__ void dump(E* to, SharedTile<columns> from, int rows) {
    constexpr int chunks = SharedTile<columns>::chunks;
    for (int i = static_cast<int>(threadIdx.x); i < rows * chunks; i += static_cast<int>(blockDim.x))
        store128(to + i * 8, *reinterpret_cast<const uint4*>(from.at(i / chunks, i % chunks)));
}

}  // namespace llamac
