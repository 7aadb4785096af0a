// The matrix instructions of the emulated device, against the places that their vendors document.
#pragma once
#include "tile_matrix.h"

#if defined(LLAMAC_CPU)
namespace llamac {

// The lane, and there which bf16 of an operand's registers, or which sum.
struct Place {
    int lane, index;
};
// The elements of rows x columns, each where place() says.
template <class E, class At>
std::vector<E> registers(const Matrix<E>& matrix, int each, At place) {
    std::vector<E> elements(static_cast<size_t>(warp_size) * each);
    for (int r = 0; r < matrix.rows; r++)
        for (int c = 0; c < matrix.columns; c++) {
            const Place p = place(r, c);
            elements[static_cast<size_t>(p.lane) * each + p.index] = matrix(r, c);
        }
    return elements;
}

template <int a_words, int b_words, int sums, class EA, class EB, class Instruction>
__global__ void instruction_kernel(float* c, const EA* a, const EB* b, Instruction run) {
    uint32_t x[a_words], y[b_words];
    float z[sums];
    constexpr unsigned bytes = sizeof(uint32_t), a_each = a_words * bytes / sizeof(EA),
                       b_each = b_words * bytes / sizeof(EB);
    std::memcpy(x, a + threadIdx.x * a_each, sizeof x);
    std::memcpy(y, b + threadIdx.x * b_each, sizeof y);
    std::memcpy(z, c + threadIdx.x * sums, sizeof z);
    run(z, x, y);
    std::memcpy(c + threadIdx.x * sums, z, sizeof z);
}
// c[M][N] += a[M][K] b[K][N].
template <int M, int N, int K, class EA = bf16, class EB = bf16, class A, class B, class C, class Instruction>
void check_instruction(const char* what, A a_place, B b_place, C c_place, Instruction run) {
    constexpr int a_each = M * K / warp_size, b_each = N * K / warp_size, sums = M * N / warp_size;
    constexpr int a_words = a_each * sizeof(EA) / 4, b_words = b_each * sizeof(EB) / 4;
    const Matrix<EA> a = integers<EA>(M, K, 14);
    const Matrix<EB> b = integers<EB>(K, N, 15);
    std::vector<float> start(warp_size * sums);
    for (size_t i = 0; i < start.size(); i++) start[i] = static_cast<float>(i);
    const Buffer<EA> device_a(registers(a, a_each, a_place));
    const Buffer<EB> device_b(registers(b, b_each, b_place));
    const Buffer<float> device_c(start);
    launch(Grid(1, warp_size, nullptr), instruction_kernel<a_words, b_words, sums, EA, EB, Instruction>,
           device_c.data, device_a.data, device_b.data, run);
    const std::vector<float> all = device_c.read();
    Matrix<float> found{M, N}, expected{M, N};
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            const Place p = c_place(m, n);
            const size_t at = static_cast<size_t>(p.lane) * sums + p.index;
            found(m, n) = all[at], expected(m, n) = start[at];
            for (int k = 0; k < K; k++) expected(m, n) += float(a(m, k)) * float(b(k, n));
        }
    same(found, expected, what);
}

// check<EA, EB>() for the pairs of types that products have, in both forms.
template <class Check>
void check_fp8_pairs(Check check) {
    const auto form = [&]<class E4, class E5>(E4, E5) {
        check(E4(), E4());
        check(E4(), E5());
        check(E5(), E4());
        check(E5(), E5());
    };
    form(e4m3(), e5m2());
    form(e4m3fnuz(), e5m2fnuz());
}

#if LLAMAC_WARP == 64
// "AMD Instinct MI300" Instruction Set Architecture, 7.1.4; AMD matrix instruction calculator.
template <class E>
void check_mfma(const char* what) {
    check_instruction<16, 16, 16, E, E>(
        what, [](int m, int k) { return Place{m + 16 * (k / 4), k % 4}; },
        [](int k, int n) { return Place{n + 16 * (k / 4), k % 4}; },
        [](int m, int n) { return Place{n + 16 * (m / 4), m % 4}; },
        [](auto& c, auto& a, auto& b) { mfma<E>(c, a, b); });
}
TEST(instructions) {
    check_mfma<bf16>("v_mfma_f32_16x16x16_bf16");
    check_mfma<fp16>("v_mfma_f32_16x16x16_f16");
    check_fp8_pairs([]<class EA, class EB>(EA, EB) {
        check_instruction<16, 16, 32, EA, EB>(
            "v_mfma_f32_16x16x32_fp8", [](int m, int k) { return Place{m + 16 * (k / 8), k % 8}; },
            [](int k, int n) { return Place{n + 16 * (k / 8), k % 8}; },
            [](int m, int n) { return Place{n + 16 * (m / 4), m % 4}; },
            [](auto& c, auto& a, auto& b) { mfma_fp8<EA, EB>(c, a, b); });
    });
}
#else
// PTX ISA, Matrix Fragments for mma.m16n8k16 with floating point type.
template <class E>
void check_mma() {
    check_instruction<16, 8, 16, E, E>(
        "mma.m16n8k16",
        [](int m, int k) { return Place{m % 8 * 4 + k % 8 / 2, k % 2 + m / 8 * 2 + k / 8 * 4}; },
        [](int k, int n) { return Place{n * 4 + k % 8 / 2, k % 2 + k / 8 * 2}; },
        [](int m, int n) { return Place{m % 8 * 4 + n / 2, n % 2 + m / 8 * 2}; },
        [](auto& c, auto& a, auto& b) { mma_m16n8k16<E>(c, a, b[0], b[1]); });
}
// PTX ISA, Matrix Fragments for mma.m16n8k32.
inline void check_mma_fp8() {
    check_fp8_pairs([]<class EA, class EB>(EA, EB) {
        check_instruction<16, 8, 32, EA, EB>(
            "mma.m16n8k32",
            [](int m, int k) { return Place{m % 8 * 4 + k % 16 / 4, k % 4 + m / 8 * 4 + k / 16 * 8}; },
            [](int k, int n) { return Place{n * 4 + k % 16 / 4, k % 4 + k / 16 * 4}; },
            [](int m, int n) { return Place{m % 8 * 4 + n / 2, n % 2 + m / 8 * 2}; },
            [](auto& c, auto& a, auto& b) { mma_m16n8k32<EA, EB>(c, a, b[0], b[1]); });
    });
}
template <bool transposed>
__global__ void ldmatrix_kernel(uint16_t* out, const uint16_t* rows) {
    uint32_t words[4];
    ldmatrix<transposed>(words, reinterpret_cast<const char*>(rows + threadIdx.x * 8));
    std::memcpy(out + threadIdx.x * 8, words, sizeof words);
}
// PTX ISA, ldmatrix: lane 8 j + r brings row r of matrix j.
template <bool transposed>
void check_ldmatrix() {
    std::vector<uint16_t> rows(32 * 8), expected(32 * 8);
    for (size_t i = 0; i < rows.size(); i++) rows[i] = static_cast<uint16_t>(257 * i + 3);
    for (int matrix = 0; matrix < 4; matrix++)
        for (int r = 0; r < 8; r++)
            for (int c = 0; c < 8; c++) {
                const int lane = transposed ? c * 4 + r / 2 : r * 4 + c / 2, half = (transposed ? r : c) % 2;
                expected[lane * 8 + matrix * 2 + half] = rows[(matrix * 8 + r) * 8 + c];
            }
    const Buffer<uint16_t> in(rows), out(rows.size());
    launch(Grid(1, 32, nullptr), ldmatrix_kernel<transposed>, out.data, in.data);
    check(out.read() == expected, transposed ? "ldmatrix, transposed" : "ldmatrix");
}
TEST(instructions) {
    check_mma<bf16>();
    check_mma<fp16>();
    check_mma_fp8();
    check_ldmatrix<false>();
    check_ldmatrix<true>();
}
#endif

}  // namespace llamac
#endif
