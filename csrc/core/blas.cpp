#include "core/blas.h"

#include <algorithm>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace llamac {
namespace {

// Blocks: K in pieces of block_k (a panel of B of that depth stays in L1 and L2), A in block_rows x block_k (L2),
// B in block_k x block_columns (L3).
constexpr int64_t block_k = 256, block_rows = 128, block_columns = 4080;

template <class A>
constexpr int64_t tile_columns = tile_vectors * lanes<A>;

// Panel j of B's block: columns j*tile_columns ..., stored [K][width], width rounded up to whole vectors with zeros.
template <class A, class T>
void pack_panel(Matrix<T> b, int64_t K, int64_t columns, A* panel) {
    const int64_t width = (columns + lanes<A> - 1) / lanes<A> * lanes<A>;
    if (b.column == 1) {
        for (int64_t k = 0; k < K; k++) {
            for (int64_t j = 0; j < columns; j++) panel[k * width + j] = A(b.data[k * b.row + j]);
            for (int64_t j = columns; j < width; j++) panel[k * width + j] = 0;
        }
        return;
    }
    constexpr int64_t strip = 16;  // a cache line of each column at a time
    for (int64_t k0 = 0; k0 < K; k0 += strip) {
        const int64_t k1 = std::min(K, k0 + strip);
        for (int64_t j = 0; j < columns; j++)
            for (int64_t k = k0; k < k1; k++) panel[k * width + j] = A(b(k, j));
        for (int64_t j = columns; j < width; j++)
            for (int64_t k = k0; k < k1; k++) panel[k * width + j] = 0;
    }
}

// tile_rows rows of A as [K][tile_rows]; missing rows are zeros.
template <class A, class T>
void pack_rows(Matrix<T> a, int64_t K, int64_t rows, A* packed) {
    if (rows == tile_rows && a.row == 1) {
        for (int64_t k = 0; k < K; k++)
            for (int64_t i = 0; i < tile_rows; i++) packed[k * tile_rows + i] = A(a.data[k * a.column + i]);
        return;
    }
    for (int64_t k = 0; k < K; k++) {
        for (int64_t i = 0; i < rows; i++) packed[k * tile_rows + i] = A(a(i, k));
        for (int64_t i = rows; i < tile_rows; i++) packed[k * tile_rows + i] = 0;
    }
}

template <class A>
struct Output {
    const A* initial;
    int64_t initial_row;
    A* c;
    int64_t c_row;
};

// One tile of C, at row i and column j of `out`; where fewer rows or columns exist, by way of a whole tile on the stack.
template <class A>
void compute_tile(int64_t K, const A* a, int64_t a_row, int64_t a_k, const A* panel, int64_t rows, int64_t columns,
                  Output<A> out) {
    const int64_t vectors = (columns + lanes<A> - 1) / lanes<A>, width = vectors * lanes<A>;
    const auto tile = vectors == 1 ? gemm_tile<1, A> : vectors == 2 ? gemm_tile<2, A> : gemm_tile<3, A>;
    static_assert(tile_vectors == 3);
    if (rows == tile_rows && columns == width)
        return tile(K, a, a_row, a_k, panel, width, out.initial, out.initial_row, out.c, out.c_row);
    A whole[tile_rows * tile_columns<A>];
    tile(K, a, a_row, a_k, panel, width, nullptr, 0, whole, width);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            out.c[i * out.c_row + j] =
                whole[i * width + j] + (out.initial ? out.initial[i * out.initial_row + j] : A(0));
}

// C's rows [begin, end) += A's rows * the packed panels of B.
template <class A, class T>
void compute_rows(int64_t begin, int64_t end, int64_t N, int64_t K, Matrix<T> a, const A* panels, Output<A> out) {
    thread_local Scratch scratch;
    A* packed = scratch.reserve<A>(block_rows * block_k);
    constexpr bool same_type = std::is_same_v<A, T>;
    for (int64_t i0 = begin; i0 < end; i0 += block_rows) {
        const int64_t i1 = std::min(end, i0 + block_rows);
        // Rows that lie contiguous in k are read where they are.
        const auto direct = [&](int64_t i) { return same_type && a.column == 1 && i + tile_rows <= i1; };
        for (int64_t i = i0; i < i1; i += tile_rows)
            if (!direct(i))
                pack_rows<A, T>({&a(i, 0), a.row, a.column}, K, std::min<int64_t>(tile_rows, i1 - i),
                                packed + (i - i0) * K);
        for (int64_t j = 0; j < N; j += tile_columns<A>)
            for (int64_t i = i0; i < i1; i += tile_rows) {
                const Output<A> at{out.initial ? out.initial + i * out.initial_row + j : nullptr, out.initial_row,
                                   out.c + i * out.c_row + j, out.c_row};
                const int64_t rows = std::min<int64_t>(tile_rows, i1 - i), columns = std::min(tile_columns<A>, N - j);
                if (direct(i))
                    compute_tile(K, reinterpret_cast<const A*>(&a(i, 0)), a.row, int64_t{1}, panels + j * K, rows,
                                 columns, at);
                else
                    compute_tile(K, packed + (i - i0) * K, int64_t{1}, int64_t{tile_rows}, panels + j * K, rows,
                                 columns, at);
            }
    }
}

}  // namespace

template <class A, class T>
void gemm(int64_t M, int64_t N, int64_t K, Matrix<T> a, Matrix<T> b, const A* initial, int64_t initial_row, A* c,
          int64_t c_row) {
    thread_local Scratch scratch;
    A* panels = scratch.reserve<A>(std::min(K, block_k) * (std::min(N, block_columns) + lanes<A>));
    for (int64_t j0 = 0; j0 < N; j0 += block_columns) {
        const int64_t columns = std::min(block_columns, N - j0);
        for (int64_t k0 = 0; k0 < K; k0 += block_k) {
            const int64_t depth = std::min(block_k, K - k0);
            const bool first = k0 == 0;
            const Output<A> out{first ? (initial ? initial + j0 : nullptr) : c + j0, first ? initial_row : c_row, c + j0, c_row};
#pragma omp parallel
            {
#pragma omp for
                for (int64_t j = 0; j < columns; j += tile_columns<A>)
                    pack_panel<A, T>({&b(k0, j0 + j), b.row, b.column}, depth, std::min(tile_columns<A>, columns - j),
                               panels + j * depth);
                int64_t thread = 0, threads = 1;
#ifdef _OPENMP
                thread = omp_get_thread_num(), threads = omp_get_num_threads();
#endif
                const int64_t tiles = (M + tile_rows - 1) / tile_rows;
                const int64_t begin = tiles * thread / threads * tile_rows;
                const int64_t end = std::min(M, tiles * (thread + 1) / threads * tile_rows);
                compute_rows<A, T>(begin, end, columns, depth, {&a(0, k0), a.row, a.column}, panels, out);
            }
        }
    }
}

template void gemm(int64_t, int64_t, int64_t, Matrix<float>, Matrix<float>, const float*, int64_t, float*, int64_t);
template void gemm(int64_t, int64_t, int64_t, Matrix<bf16>, Matrix<bf16>, const float*, int64_t, float*, int64_t);
template void gemm(int64_t, int64_t, int64_t, Matrix<double>, Matrix<double>, const double*, int64_t, double*, int64_t);

}  // namespace llamac
