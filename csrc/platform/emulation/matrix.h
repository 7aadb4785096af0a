// The matrix instructions, emulated: each is one warp operation, lanes and registers as the hardware has them.
#pragma once
#include "platform/emulation/emulation.h"

namespace llamac {
namespace emulation {

// Element i of a lane's registers, of a type of core/dtype.h.
template <class E>
float element(const uint32_t* words, int i) {
    E e;
    std::memcpy(&e, reinterpret_cast<const char*>(words) + i * sizeof(E), sizeof(E));
    return static_cast<float>(e);
}

// The operands of one lane: its elements of a and b, and its sums.
struct MatrixLane {
    const uint32_t *a, *b;
    float* sums;
};
// c[m][n] += sum_k a[m][k] * b[n][k] for M x N x K, in fp32. Layout: which element a lane's i-th one is. Not instrumented: it
// accesses registers only, and took half of a test's time under a sanitizer.
template <class Layout, class A, class B>
__attribute__((no_sanitize("address", "undefined", "thread"))) void matrix_multiply(void* const* lanes,
                                                                                    Site site) {
    using L = Layout;
    float a[L::M][L::K], b[L::N][L::K];
    for (int l = 0; l < warp_size; l++) {
        if (!lanes[l]) die(site, "a matrix instruction without all lanes of its warp");
        const MatrixLane& lane = *static_cast<MatrixLane*>(lanes[l]);
        for (int i = 0; i < L::M * L::K / warp_size; i++)
            a[L::a_row(l, i)][L::a_k(l, i)] = element<A>(lane.a, i);
        for (int i = 0; i < L::N * L::K / warp_size; i++)
            b[L::b_row(l, i)][L::b_k(l, i)] = element<B>(lane.b, i);
    }
    for (int l = 0; l < warp_size; l++)
        for (int i = 0; i < L::M * L::N / warp_size; i++) {
            const float *x = a[L::c_row(l, i)], *y = b[L::c_column(l, i)];
            float& sum = static_cast<MatrixLane*>(lanes[l])->sums[i];
            for (int k = 0; k < L::K; k++) sum += x[k] * y[k];
        }
}
template <class Layout, class A, class B>
void matrix(float* sums, const uint32_t* a, const uint32_t* b, Site site) {
    MatrixLane lane{a, b, sums};
    collective(matrix_multiply<Layout, A, B>, &lane, site);
}

// v_mfma_f32_16x16x16_bf16_1k and that of f16.
struct MfmaLayout {
    static constexpr int M = 16, N = 16, K = 16;
    static int a_row(int l, int) { return l % 16; }
    static int a_k(int l, int i) { return l / 16 * 4 + i; }
    static int b_row(int l, int) { return l % 16; }
    static int b_k(int l, int i) { return l / 16 * 4 + i; }
    static int c_row(int l, int i) { return l / 16 * 4 + i; }
    static int c_column(int l, int) { return l % 16; }
};
// v_mfma_f32_16x16x32_fp8_fp8 and its relatives.
struct MfmaFp8Layout : MfmaLayout {
    static constexpr int K = 32;
    static int a_k(int l, int i) { return l / 16 * 8 + i; }
    static int b_k(int l, int i) { return l / 16 * 8 + i; }
};
// mma.sync.m16n8k16 of bf16 and fp16, m16n8k32 of fp8. each: elements of a register.
template <int each>
struct MmaLayout {
    static constexpr int M = 16, N = 8, K = 8 * each;
    static int a_row(int l, int i) { return l / 4 + i / each % 2 * 8; }
    static int a_k(int l, int i) { return l % 4 * each + i % each + i / each / 2 * 4 * each; }
    static int b_row(int l, int) { return l / 4; }
    static int b_k(int l, int i) { return l % 4 * each + i % each + i / each * 4 * each; }
    static int c_row(int l, int i) { return l / 4 + i / 2 * 8; }
    static int c_column(int l, int i) { return l % 4 * 2 + i % 2; }
};

struct MatrixRow {
    uint16_t row[8];
    uint32_t* out;
};
template <bool transposed>
void load_matrices(void* const* lanes, Site site) {
    for (int l = 0; l < warp_size; l++) {
        if (!lanes[l]) die(site, "a matrix load without all lanes of its warp");
        for (int j = 0; j < 4; j++) {
            const auto element = [&](int row, int column) -> uint32_t {
                return static_cast<MatrixRow*>(lanes[j * 8 + row])->row[column];
            };
            const int first = l / 4, pair = l % 4 * 2;
            static_cast<MatrixRow*>(lanes[l])->out[j] =
                transposed ? element(pair, first) | element(pair + 1, first) << 16
                           : element(first, pair) | element(first, pair + 1) << 16;
        }
    }
}

}  // namespace emulation

template <class E>
void mfma(float (&c)[4], const uint32_t (&a)[2], const uint32_t (&b)[2], const char* file = __builtin_FILE(),
          int line = __builtin_LINE()) {
    emulation::matrix<emulation::MfmaLayout, E, E>(c, a, b, {file, line});
}
template <class E>
void mma_m16n8k16(float* c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    const uint32_t b[2] = {b0, b1};
    emulation::matrix<emulation::MmaLayout<2>, E, E>(c, a, b, {file, line});
}
// Both forms: the emulated device represents both vendors.
template <class F>
constexpr bool multiplies_fp8 = true;
template <class A, class B>
void mfma_fp8(float (&c)[4], const uint32_t (&a)[2], const uint32_t (&b)[2],
              const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    emulation::matrix<emulation::MfmaFp8Layout, A, B>(c, a, b, {file, line});
}
template <class A, class B>
void mma_m16n8k32(float* c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    const uint32_t b[2] = {b0, b1};
    emulation::matrix<emulation::MmaLayout<4>, A, B>(c, a, b, {file, line});
}
using SharedAddress = const char*;
inline SharedAddress shared_address(const char* p) {
    return p;
}
inline SharedAddress settled(SharedAddress p) {
    return p;
}
// Each lane reads the row at its address, so that the sanitizers see the access.
template <bool transposed>
void ldmatrix(uint32_t (&out)[4], const char* row, const char* file = __builtin_FILE(),
              int line = __builtin_LINE()) {
    emulation::MatrixRow lane;
    lane.out = out;
    const uint4 bits = *reinterpret_cast<const uint4*>(row);
    std::memcpy(lane.row, &bits, sizeof(bits));
    emulation::collective(emulation::load_matrices<transposed>, &lane, {file, line});
}

// The upper halves of two words, and the lower ones, as __builtin_amdgcn_perm gives them in one instruction.
inline uint32_t lower_halves(uint32_t low, uint32_t high) {
    return (low & 0xffffu) | high << 16;
}
inline uint32_t upper_halves(uint32_t low, uint32_t high) {
    return low >> 16 | (high & 0xffff0000u);
}
template <int n>
void load_words(uint32_t (&out)[n], const char* uniform, uint32_t offset) {
    std::memcpy(out, uniform + offset, sizeof(out));
}
inline void wait_for_loads() {}
template <class W>
W load_word(const W* p) {
    W x;
    __atomic_load(p, &x, __ATOMIC_RELAXED);
    return x;
}
template <class W>
void store_word(W* p, W x) {
    __atomic_store(p, &x, __ATOMIC_RELAXED);
}
inline void add_word(float* p, float x) {
    const float sum = load_word(p) + x;  // no other block's turn
    store_word(p, sum);
}
inline void wait_for_memory() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
template <int>
void set_priority() {}

}  // namespace llamac
