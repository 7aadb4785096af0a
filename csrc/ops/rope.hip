// Rotary position embedding (Su et al., "RoFormer", 2021): every pair of a head's channels is
// turned by its position's angle.
//
//   (out_a, out_b) = (x_a cos - x_b sin, x_b cos + x_a sin),   cos, sin = cis[t,j,:], j < HD/2
//   pairs (a, b):  half split (Hugging Face) (j, j + HD/2);  interleaved (Llama's own weights) (2j, 2j+1)
//
// Backward turns the gradient back: the same with -sin. Output may be input's memory: a pair is read before
// it is written.
//
// reference: plain loops.
// cpu:       positions over threads; a position's cosines and sines are laid out as vectors once for all its
//            heads.
#include "core/registry.h"
#include "core/simd.h"

namespace llamac {
namespace {

// direction: 1 forward, -1 backward.
template <class T, int direction>
void rope_reference(View<T, 4> out, View<const T, 4> x, View<const arithmetic<T>, 3> cis, bool interleaved) {
    using A = arithmetic<T>;
    const int64_t B = x.shape[0], time = x.shape[1], NH = x.shape[2], half = x.shape[3] / 2;
    for (int64_t b = 0; b < B; b++)
        for (int64_t t = 0; t < time; t++)
            for (int64_t h = 0; h < NH; h++)
                for (int64_t j = 0; j < half; j++) {
                    const int64_t i0 = interleaved ? 2 * j : j, i1 = interleaved ? 2 * j + 1 : j + half;
                    const A x0 = A(x(b, t, h, i0)), x1 = A(x(b, t, h, i1));
                    const A c = cis(t, j, 0), s = direction * cis(t, j, 1);
                    out(b, t, h, i0) = T(x0 * c - x1 * s);
                    out(b, t, h, i1) = T(x1 * c + x0 * s);
                }
}

template <class T>
void rotate_half_split(T* out, const T* x, const float* c, const float* s, int64_t half) {
#pragma omp simd
    for (int64_t j = 0; j < half; j++) {
        const float x0 = float(x[j]), x1 = float(x[j + half]);
        store(out + j, x0 * c[j] - x1 * s[j]);
        store(out + j + half, x1 * c[j] + x0 * s[j]);
    }
}

template <class T>
void rotate_interleaved(T* out, const T* x, const float* c, const float* s, int64_t half) {
#pragma omp simd
    for (int64_t j = 0; j < half; j++) {
        const float x0 = float(x[2 * j]), x1 = float(x[2 * j + 1]);
        store(out + 2 * j, x0 * c[j] - x1 * s[j]);
        store(out + 2 * j + 1, x1 * c[j] + x0 * s[j]);
    }
}

template <class T, int direction>
void rope_cpu(View<T, 4> out, View<const T, 4> x, View<const float, 3> cis, bool interleaved) {
    const int64_t B = x.shape[0], time = x.shape[1], NH = x.shape[2], half = x.shape[3] / 2;
#pragma omp parallel
    {
        std::vector<float> cosines(half), sines(half);
#pragma omp for
        for (int64_t t = 0; t < time; t++) {
            for (int64_t j = 0; j < half; j++) {
                cosines[j] = cis(t, j, 0);
                sines[j] = direction * cis(t, j, 1);
            }
            for (int64_t b = 0; b < B; b++)
                for (int64_t h = 0; h < NH; h++) {
                    const auto rotate = interleaved ? rotate_interleaved<T> : rotate_half_split<T>;
                    rotate(&out(b, t, h, 0), &x(b, t, h, 0), cosines.data(), sines.data(), half);
                }
        }
    }
}

double rope_flops(const Call& c) {
    return 3.0 * c["B"] * c["T"] * c["NH"] * c["HD"];
}

Operation rope_forward(
    "rope_forward(out: T[B,T,NH,HD] strided; x: T[B,T,NH,HD] strided, cis: A[T,HD/2,2];"
    " interleaved: bool)",
    "turns every pair of a head's channels by its position's angle",
    {{"cpu", "positions over threads", Where::host, entries<rope_cpu<float, 1>, rope_cpu<bf16, 1>>()},
     {"reference", "plain loops", Where::host,
      entries<rope_reference<float, 1>, rope_reference<bf16, 1>, rope_reference<double, 1>>()}},
    rope_flops);

Operation rope_backward(
    "rope_backward(dx: T[B,T,NH,HD] strided; dout: T[B,T,NH,HD] strided, cis: A[T,HD/2,2];"
    " interleaved: bool)",
    "turns the gradient of rope_forward back",
    {{"cpu", "positions over threads", Where::host, entries<rope_cpu<float, -1>, rope_cpu<bf16, -1>>()},
     {"reference", "plain loops", Where::host,
      entries<rope_reference<float, -1>, rope_reference<bf16, -1>, rope_reference<double, -1>>()}},
    rope_flops);

}  // namespace
}  // namespace llamac
