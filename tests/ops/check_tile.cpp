// The tile interface over the matrix cores (platform/tile.h), each operation against plain arithmetic: small
// integers, so that every sum is exact. Of the emulated device also the instructions underneath, against the
// places that their vendors document. Sizes that a layout does not have are left out.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "tile_instructions.h"
#include "tile_lds.h"

using namespace llamac;

namespace {

using T = Tile;
constexpr int R = tile_rows;

// ---- accumulators by their elements

// Rows are `stride` elements apart.
__device__ T::Accumulator accumulator_of(const float* from, int stride) {
    T::Accumulator c;
    for (int i = 0; i < T::elements; i++) c.x[i] = from[T::row(T::slot(i)) * stride + T::column(i)];
    return c;
}
__device__ void write(float* to, int stride, const T::Accumulator& c) {
    for (int i = 0; i < T::elements; i++) to[T::row(T::slot(i)) * stride + T::column(i)] = c.x[i];
}

// ---- which element a lane holds, reductions over rows

struct Element {
    int slot, row, column;
};
__global__ void places_kernel(Element* out) {
    for (int i = 0; i < T::elements; i++)
        out[static_cast<int>(threadIdx.x) * T::elements + i] = {T::slot(i), T::row(T::slot(i)), T::column(i)};
}
// A lane's rows, and of one value a lane the largest and the sum over the lanes that hold its row `slot`.
__global__ void row_reductions_kernel(int* rows, float* out, const float* in) {
    const int i = static_cast<int>(threadIdx.x);
    for (int slot = 0; slot < T::slots; slot++) rows[i * T::slots + slot] = T::row(slot);
    out[2 * i] = T::row_max(in[i]);
    out[2 * i + 1] = T::row_sum(in[i]);
}
void places() {
    constexpr int elements = T::elements, slots = T::slots;
    const int warp = device_warp(), threads = block_threads();
    const Buffer<Element> out(static_cast<size_t>(threads) * elements);
    launch(Grid(1, threads, nullptr), places_kernel, out.data);
    const std::vector<Element> found = out.read();
    bool inside = elements * warp == R * R;
    std::vector<int> times(warps * R * R);
    for (size_t i = 0; i < found.size(); i++) {
        const Element& e = found[i];
        inside &= e.slot >= 0 && e.slot < slots && e.row >= 0 && e.row < R && e.column >= 0 && e.column < R;
        const int w = static_cast<int>(i) / (warp * elements);
        if (inside) times[(w * R + e.row) * R + e.column]++;
    }
    check(inside && times == std::vector<int>(times.size(), 1), "each element of a tile in one lane once");

    std::vector<float> in(threads), expected(2 * threads);
    for (int i = 0; i < threads; i++) in[i] = static_cast<float>(-1 - i * 7 % 101);  // all negative
    const Buffer<float> input(in), output(2 * in.size());
    const Buffer<int> rows(static_cast<size_t>(threads) * slots);
    launch(Grid(1, threads, nullptr), row_reductions_kernel, rows.data, output.data, input.data);
    const std::vector<int> row = rows.read();
    for (int i = 0; i < threads; i++) {
        float largest = -INFINITY, sum = 0;
        for (int j = i / warp * warp; j < i / warp * warp + warp; j++)
            if (row[j * slots] == row[i * slots]) largest = std::max(largest, in[j]), sum += in[j];
        expected[2 * i] = largest, expected[2 * i + 1] = sum;
        for (int slot = 0; slot < slots; slot++)  // lanes with one row in common have all in common
            for (int j = i / warp * warp; j < i; j++)
                inside &=
                    (row[j * slots + slot] == row[i * slots + slot]) == (row[j * slots] == row[i * slots]);
    }
    check(inside && output.read() == expected, "row_max and row_sum of a tile");
}

// ---- products of rows; of fp8, two stand in the place of a bf16

template <int depth, int columns, class A, class B>
__global__ void rows_kernel(float* out, const float* start, const bf16* a, const bf16* b, int first, int k) {
    constexpr int rows = warps * R;
    constexpr bool is_fp8 = sizeof(A) == 1;
    const int row = warp_index() * R;
    const SharedTile<columns> shared_a{dynamic_shared_memory()}, shared_b{shared_a.data + rows * columns * 2};
    fill(shared_a, a, rows);
    fill(shared_b, b, rows);
    T::Operand x[depth];
    std::conditional_t<is_fp8, T::RightOperand, T::Operand> y[depth];
    T::load_rows(x, shared_a, row, k);
    T::load_rows(y, shared_b, first, k);
    T::Accumulator c = accumulator_of(start + row * R, R);
    for (int d = 0; d < depth; d++) {
        if constexpr (!is_fp8)
            T::multiply<A>(c, x[d], y[d]);
        else if constexpr (multiplies_fp8<A> && multiplies_fp8<B>)
            T::multiply_fp8<A, B>(c, x[d], y[d]);
    }
    write(out + row * R, R, c);
}
template <class E>
std::vector<bf16> words(const Matrix<E>& of) {
    std::vector<bf16> words(of.values.size() * sizeof(E) / 2);
    std::memcpy(words.data(), of.values.data(), words.size() * 2);
    return words;
}
template <int depth, int columns, class A = bf16, class B = bf16>
void check_rows() {
    constexpr int rows = warps * R, each = 2 / sizeof(A);
    const Matrix<A> a = integers<A>(rows, each * columns, 1);
    const Matrix<B> b = integers<B>(rows, each * columns, 2);
    const Matrix<float> start = integers<float>(rows, R, 3);
    const Buffer<bf16> device_a(words(a)), device_b(words(b));
    const Buffer<float> device_start(start.values);
    for (int first = 0; first <= R; first += 16)
        for (int k = 0; k <= columns - 16 * depth; k += 32) {
            const Buffer<float> out(Matrix<float>{rows, R}.values);
            launch(Grid(1, block_threads(), nullptr, 2 * SharedTile<columns>::bytes(rows)),
                   rows_kernel<depth, columns, A, B>, out.data, device_start.data, device_a.data,
                   device_b.data, first, k);
            Matrix<float> expected = start;
            for (int m = 0; m < rows; m++)
                for (int n = 0; n < R; n++)
                    for (int i = each * k; i < each * (k + 16 * depth); i++)
                        expected(m, n) += float(a(m, i)) * float(b(first + n, i));
            same(result(out, rows, R), expected,
                 "load_rows of " + text(columns) + " columns from row " + text(first) + ", k " + text(k) +
                     ", depth " + text(depth) + " of " + name(dtype_of<A>()));
        }
}
void products_of_rows() {
    check_rows<2, 32>();
    check_rows<2, 64>();
    check_rows<4, 64>();
    check_rows<8, 128>();
}
template <class A, class B>
void check_fp8_rows() {
    if (multiplies(device_properties().fp8, A::is_fnuz)) check_rows<2, 64, A, B>();
}
void products_of_fp8() {
    check_fp8_rows<e4m3, e4m3>();
    check_fp8_rows<e5m2, e4m3>();
    check_fp8_rows<e4m3, e5m2>();
    check_fp8_rows<e4m3fnuz, e4m3fnuz>();
    check_fp8_rows<e5m2fnuz, e4m3fnuz>();
    check_fp8_rows<e4m3fnuz, e5m2fnuz>();
}

// ---- products of accumulators

// out = p b, p an accumulator of R columns, b R rows of two tiles.
template <class E>
__global__ void as_operand_kernel(float* out, const float* p, const E* b) {
    constexpr int count = 2, columns = count * R;
    static_assert(T::width<count> == count);
    const int row = warp_index() * R;
    const SharedTile<columns> shared_b{dynamic_shared_memory()};
    fill(shared_b, b, R);
    T::Operand y[count];
    T::load_columns<Order::natural, count>(y, shared_b, 0, 0);
    const T::Operand x = T::as_operand<E>(accumulator_of(p + row * R, R));
    for (int t = 0; t < count; t++) {
        T::Accumulator c = {};
        T::multiply<E>(c, x, y[t]);
        for (int i = 0; i < T::elements; i++)
            out[(row + T::row(T::slot(i))) * columns + T::interleaved<count>(t, T::column(i))] = c.x[i];
    }
}
template <class E>
Matrix<float> product_of(const Matrix<float>& p, const Matrix<E>& b) {
    const Buffer<float> out(Matrix<float>{warps * R, b.columns}.values), device_p(p.values);
    const Buffer<E> device_b(b.values);
    launch(Grid(1, block_threads(), nullptr, SharedTile<2 * R>::bytes(R)), as_operand_kernel<E>, out.data,
           device_p.data, device_b.data);
    return result(out, warps * R, b.columns);
}
template <class E>
void accumulators_as_operands() {
    const Matrix<float> p = integers<float>(warps * R, R, 4);
    const Matrix<E> b = integers<E>(R, 2 * R, 5);
    Matrix<float> expected{warps * R, 2 * R};
    for (int m = 0; m < warps * R; m++)
        for (int n = 0; n < 2 * R; n++) {
            expected(m, n) = 0;
            for (int i = 0; i < R; i++) expected(m, n) += p(m, i) * float(b(i, n));
        }
    same(product_of(p, b), expected, "as_operand");
    // The unit matrix shows what p was rounded to: an E at most half a place away.
    Matrix<E> unit{R, 2 * R, std::vector<E>(2 * R * R, E(0.0f))};
    for (int n = 0; n < R; n++) unit(n, n) = E(1.0f);
    Matrix<float> fine = p;
    for (size_t i = 0; i < fine.values.size(); i++)
        fine.values[i] = std::exp2(static_cast<float>(i % 23) / -1.7f) * (i % 3 == 0 ? -1.0f : 1.0f);
    const Matrix<float> rounded = product_of(fine, unit);
    bool right = true;
    for (int m = 0; m < warps * R; m++)
        for (int n = 0; n < R; n++) {
            const float found = rounded(m, n), exact = fine(m, n);
            right &= found == float(E(found)) &&
                     std::fabs(found - exact) <= std::ldexp(0.5f, std::ilogb(exact) - E::mantissa);
        }
    check(right, "as_operand rounds to nearest");
}

// ---- products with columns

// out[m][n] = sum_k a[m][k] * v[k][column + n], n < count * R, k < 64. a comes from LDS in any order, from
// accumulators in the natural one. transposed: the columns are rows of the product.
template <Order order, int count, int columns, bool transposed>
__global__ void columns_kernel(float* out, const bf16* a, const float* p, const bf16* v, int column) {
    constexpr int depth = 4, width = T::width<count>;
    const int row = warp_index() * R;
    const SharedTile<64> shared_a{dynamic_shared_memory()};
    const SharedTile<columns> shared_v{shared_a.data + warps * R * 64 * 2};
    fill(shared_a, a, warps * R);
    fill(shared_v, v, 16 * depth);
    T::Operand x[depth];
    if constexpr (order == Order::any)
        T::load_rows(x, shared_a, row, 0);
    else
        for (int d = 0; d < depth; d++) x[d] = T::as_operand<bf16>(accumulator_of(p + row * 64 + R * d, 64));
    T::Accumulator c[count] = {};
    for (int d = 0; d < depth; d++)
        for (int o = 0; o < count; o += width) {
            T::Operand y[width];
            T::load_columns<order, count>(y, shared_v, 16 * d, o, column);
            for (int t = 0; t < width; t++)
                transposed ? T::multiply<bf16>(c[o + t], y[t], x[d])
                           : T::multiply<bf16>(c[o + t], x[d], y[t]);
        }
    for (int o = 0; o < count; o++)
        for (int i = 0; i < T::elements; i++) {
            const int r = T::row(T::slot(i)), s = T::column(i);
            const int m = transposed ? s : r, n = T::interleaved<count>(o, transposed ? r : s);
            out[(row + m) * count * R + n] = c[o].x[i];
        }
}
template <Order order, int count, int columns, bool transposed>
void check_columns() {
    constexpr int rows = warps * R, deep = 64, wide = count * R;
    const Matrix<bf16> a = integers<bf16>(rows, deep, 6), v = integers<bf16>(deep, columns, 7);
    const std::vector<float> p(a.values.begin(), a.values.end());
    const Buffer<bf16> device_a(a.values), device_v(v.values);
    const Buffer<float> device_p(p);
    for (int column = 0; column <= columns - wide; column += columns - wide > 0 ? columns - wide : 1) {
        const Buffer<float> out(Matrix<float>{rows, wide}.values);
        launch(
            Grid(1, block_threads(), nullptr, SharedTile<64>::bytes(rows) + SharedTile<columns>::bytes(deep)),
            columns_kernel<order, count, columns, transposed>, out.data, device_a.data, device_p.data,
            device_v.data, column);
        Matrix<float> expected{rows, wide};
        for (int m = 0; m < rows; m++)
            for (int n = 0; n < wide; n++) {
                expected(m, n) = 0;
                for (int k = 0; k < deep; k++) expected(m, n) += float(a(m, k)) * float(v(k, column + n));
            }
        same(result(out, rows, wide), expected,
             std::string("load_columns in ") + (order == Order::any ? "any" : "natural") + " order of " +
                 text(count) + " operands from column " + text(column) + " of " + text(columns) +
                 (transposed ? ", as rows" : ""));
    }
}
template <int count, int columns>
void check_columns_in_orders() {
    check_columns<Order::any, count, columns, false>();
    check_columns<Order::any, count, columns, true>();
    check_columns<Order::natural, count, columns, false>();
    check_columns<Order::natural, count, columns, true>();
}
void products_of_columns() {
    check_columns_in_orders<2, 2 * R>();
    check_columns_in_orders<2, 128>();
    check_columns_in_orders<4, 4 * R>();
    check_columns_in_orders<4, 4 * R + 64>();
    check_columns_in_orders<8, 8 * R>();
    check_columns_in_orders<16, 16 * R>();
}

// ---- back to LDS

template <class E, int count, int columns>
__global__ void store_rows_kernel(E* out, const float* in, const E* before) {
    const int row = warp_index() * R;
    const SharedTile<columns> tile{dynamic_shared_memory()};
    fill(tile, before, warps * R);
    T::Accumulator c[count];
    for (int o = 0; o < count; o++)
        for (int i = 0; i < T::elements; i++)
            c[o].x[i] = in[(row + T::row(T::slot(i))) * columns + T::interleaved<count>(o, T::column(i))];
    T::store_rows<E>(tile, row, c);
    __syncthreads();
    dump(out, tile, warps * R);
}
template <class E, int count, int columns>
void check_store_rows() {
    constexpr int rows = warps * R;
    const Matrix<float> in = integers<float>(rows, columns, 8);
    Matrix<E> expected = integers<E>(rows, columns, 9);
    const Buffer<E> before(expected.values), out(expected.values.size());
    const Buffer<float> device_in(in.values);
    launch(Grid(1, block_threads(), nullptr, SharedTile<columns>::bytes(rows)),
           store_rows_kernel<E, count, columns>, out.data, device_in.data, before.data);
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < count * R; n++) expected(m, n) = E(in(m, n));
    same(result(out, rows, columns), expected,
         "store_rows of " + text(count) + " tiles in " + text(columns) + " columns");
}
void stored_rows() {
    check_store_rows<bf16, 2, 2 * R>();
    check_store_rows<bf16, 2, 128>();
    check_store_rows<bf16, 4, 128>();
    check_store_rows<fp16, 4, 128>();
    check_store_rows<bf16, 8, 256>();
    check_store_rows<bf16, 16, 256>();
}

void tiles() {
    places();
    products_of_rows();
    accumulators_as_operands<bf16>();
    accumulators_as_operands<fp16>();
    products_of_columns();
    stored_rows();
}
TEST(all_tiles) {
    tiles();
    products_of_fp8();
}

}  // namespace

int main(int argc, char** argv) {
    return run_device_checks(argc, argv);
}
