// Attention of the next token of each of B sequences to a cache of keys and values; its own key and value are added first. All
// sequences end at the same position of the cache, end[0], which takes the new keys and values; sequence b begins at begin[b],
// its rotary position 0. With p = end[0] - begin[b], and rope() as rope_forward computes it, half split; keys are rounded to
// the storage type, queries are not:
//
//   keys[b,end,h,:]   = rope(k[b,h,:], cis[p])
//   values[b,end,h,:] = v[b,h,:]
//   out[b,h,:]        = sum_s p[s] * values[b,s,g,:],  p = softmax over s of scale * rope(q[b,h,:], cis[p]) keys[b,s,g,:]
//
// with g = h / (NH/NKV), over the positions s from begin[b] to end[0], the last `window` of them if window is not 0. All other
// positions of keys and values keep their values. begin and end are in the device's memory, so that one captured graph serves
// every token; the host does not check them. A begin behind end counts as end.
//
// reference:  plain loops.
// cpu:        heads over threads, keys and values where they lie (one_query.h).
// naive:      a kernel that turns and stores, then one thread per element of out.
// vectorized: keys over blocks and groups of lanes (decode_vectorized.hip).
//
// Measured: docs/benchmarks/nvidia-h200.md.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/device.h"
#include "core/operation.h"
#include "ops/attention/decode.h"
#include "ops/attention/one_query.h"
#include "ops/rope.h"

namespace llamac {
namespace {

template <class T>
void attention_decode_reference(View<T, 3> out, View<T, 4> keys, View<T, 4> values, View<const T, 3> q,
                                View<const T, 3> k, View<const T, 3> v, View<const arithmetic<T>, 3> cis,
                                View<const int32_t, 1> begin, View<const int32_t, 1> end, double scale,
                                int64_t window) {
    using A = arithmetic<T>;
    const int64_t B = q.shape[0], NH = q.shape[1], HD = q.shape[2], NKV = k.shape[1], half = HD / 2;
    std::vector<A> p(keys.shape[1]), query(HD);
    std::vector<double> sums(HD);
    for (int64_t b = 0; b < B; b++) {
        const DecodePlace place(begin.data, end.data, b, keys.shape[1], window);
        const auto turn = [&](auto* to, const T* from) {
            using To = std::remove_pointer_t<decltype(to)>;
            for (int64_t j = 0; j < half; j++) {
                const A c = cis(place.rotary, j, 0), s = cis(place.rotary, j, 1), x0 = A(from[j]),
                        x1 = A(from[j + half]);
                to[j] = To(x0 * c - x1 * s);
                to[j + half] = To(x1 * c + x0 * s);
            }
        };
        for (int64_t h = 0; h < NKV; h++) {
            turn(&keys(b, place.end, h, 0), &k(b, h, 0));
            for (int64_t d = 0; d < HD; d++) values(b, place.end, h, d) = v(b, h, d);
        }
        for (int64_t h = 0; h < NH; h++) {
            const int64_t g = h / (NH / NKV);
            turn(query.data(), &q(b, h, 0));
            A largest = -std::numeric_limits<A>::infinity();
            double sum = 0;
            for (int64_t s = place.from; s <= place.end; s++) {
                double dot = 0;
                for (int64_t d = 0; d < HD; d++) dot += double(query[d]) * double(A(keys(b, s, g, d)));
                p[s] = A(scale * dot);
                largest = std::max(largest, p[s]);
            }
            for (int64_t s = place.from; s <= place.end; s++) sum += p[s] = std::exp(p[s] - largest);
            std::fill(sums.begin(), sums.end(), 0.0);
            for (int64_t s = place.from; s <= place.end; s++)
                for (int64_t d = 0; d < HD; d++) sums[d] += double(p[s]) * double(A(values(b, s, g, d)));
            for (int64_t d = 0; d < HD; d++) out(b, h, d) = T(sums[d] / sum);
        }
    }
}

template <class T>
void attention_decode_cpu(View<T, 3> out, View<T, 4> keys, View<T, 4> values, View<const T, 3> q,
                          View<const T, 3> k, View<const T, 3> v, View<const float, 3> cis,
                          View<const int32_t, 1> begin, View<const int32_t, 1> end, double scale,
                          int64_t window) {
    const int64_t B = q.shape[0], NH = q.shape[1], HD = q.shape[2], NKV = k.shape[1], half = HD / 2,
                  S = keys.shape[1];
    static thread_local Scratch angles, turned;
    float *cosines = angles.reserve<float>(2 * half), *sines = cosines + half;
    float* const queries = turned.reserve<float>(B * NH * HD);
    [[maybe_unused]] int64_t seen = 0;
    for (int64_t b = 0; b < B; b++) {
        const DecodePlace place(begin.data, end.data, b, S, window);
        seen += place.end + 1 - place.from;
        split_angles<1>(&cis(place.rotary, 0, 0), cosines, sines, half);
        for (int64_t h = 0; h < NH; h++) {
            float* const query = queries + (b * NH + h) * HD;
            for (int64_t d = 0; d < HD; d++) query[d] = float(q(b, h, d));
            rotate_half_split(query, query, cosines, sines, half);
        }
        for (int64_t h = 0; h < NKV; h++) {
            rotate_half_split(&keys(b, place.end, h, 0), &k(b, h, 0), cosines, sines, half);
            std::copy_n(&v(b, h, 0), HD, &values(b, place.end, h, 0));
        }
    }
#pragma omp parallel for collapse(2) schedule(static) if (NH * seen * HD >= one_query::least_shared)
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < NH; h++) {
            const DecodePlace place(begin.data, end.data, b, S, window);
            const int64_t g = h / (NH / NKV);
            const one_query::Seen<T> of{
                &keys(b, place.from, g, 0), &values(b, place.from, g, 0), keys.stride[1],
                values.stride[1],           place.end + 1 - place.from,   HD};
            one_query::attend(&out(b, h, 0), queries + (b * NH + h) * HD, of, static_cast<float>(scale),
                              one_query::scratch_of<float>(of.count, HD));
        }
}

// ---- naive

// One thread per pair of channels of a query or key head; queries [B,NH,HD].
template <class T>
__global__ void attention_decode_naive_kernel_turn(float* queries, DecodeOperands<T> o, int64_t B, int64_t NH,
                                                   int64_t NKV, int64_t half, int64_t S) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, j = i % half, h = i / half % (NH + NKV),
                  b = i / half / (NH + NKV);
    if (b >= B) return;
    const DecodePlace place(o.begin, o.end, b, S, 0);
    const bool is_query = h < NH;
    const T* from = is_query ? o.q.at(b, h) : o.k.at(b, h - NH);
    const float c = o.cis[2 * (place.rotary * half + j)], s = o.cis[2 * (place.rotary * half + j) + 1];
    const float x0 = float(from[j]), x1 = float(from[j + half]);
    const float y0 = rotated(x0, x1, c, -s), y1 = rotated(x1, x0, c, s);
    if (is_query) {
        float* const to = queries + (b * NH + h) * 2 * half;
        to[j] = y0, to[j + half] = y1;
        return;
    }
    T* const to = o.keys.at(b, place.end, h - NH);
    to[j] = T(y0), to[j + half] = T(y1);
    for (const int64_t d : {j, j + half}) o.values.at(b, place.end, h - NH)[d] = o.v.at(b, h - NH)[d];
}

template <class T>
__global__ void attention_decode_naive_kernel(const float* queries, DecodeOperands<T> o, int64_t B,
                                              int64_t NH, int64_t NKV, int64_t HD, int64_t S, float scale,
                                              int64_t window) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, d = i % HD, h = i / HD % NH,
                  b = i / HD / NH, g = h / (NH / NKV);
    if (b >= B) return;
    const DecodePlace place(o.begin, o.end, b, S, window);
    const auto score = [&](int64_t s) {
        double dot = 0;
        for (int64_t c = 0; c < HD; c++)
            dot += double(queries[(b * NH + h) * HD + c]) * double(float(o.keys.at(b, s, g)[c]));
        return static_cast<float>(scale * dot);
    };
    float largest = -INFINITY;
    for (int64_t s = place.from; s <= place.end; s++) largest = fmaxf(largest, score(s));
    double sum = 0, total = 0;
    for (int64_t s = place.from; s <= place.end; s++) {
        const float p = expf(score(s) - largest);
        sum += double(p);
        total += double(p * float(o.values.at(b, s, g)[d]));
    }
    o.out.at(b, h)[d] = T(static_cast<float>(total / sum));
}

int64_t naive_workspace(const Call& c) {
    return 4 * c["B"] * c["NH"] * c["HD"];
}

template <class T>
void attention_decode_naive(View<T, 3> out, View<T, 4> keys, View<T, 4> values, View<const T, 3> q,
                            View<const T, 3> k, View<const T, 3> v, View<const float, 3> cis,
                            View<const int32_t, 1> begin, View<const int32_t, 1> end, double scale,
                            int64_t window, LaunchContext context) {
    const int64_t B = q.shape[0], NH = q.shape[1], HD = q.shape[2], NKV = k.shape[1], S = keys.shape[1];
    const DecodeOperands<T> o{row_heads(out), heads(keys), heads(values), row_heads(q), row_heads(k),
                              row_heads(v),   cis.data,    begin.data,    end.data};
    float* const queries = static_cast<float*>(context.workspace);
    launch(context.grid(B * (NH + NKV) * HD / 2), attention_decode_naive_kernel_turn<T>, queries, o, B, NH,
           NKV, HD / 2, S);
    launch(context.grid(B * NH * HD), attention_decode_naive_kernel<T>, queries, o, B, NH, NKV, HD, S, scale,
           window);
}

// Every position may be seen.
double decode_flops(const Call& c) {
    return 4.0 * static_cast<double>(c["B"] * c["NH"]) * static_cast<double>(c["M"] * c["HD"]);
}
// The new position of the cache is only written, all others are only read; one row of cis is read.
double decode_bytes(const Call& c) {
    const int64_t heads = 2 * ((c["M"] + 1) * c["NKV"] + c["NH"]);
    const double head = static_cast<double>(c["HD"] * size_of(c.operand("q").dtype));
    return static_cast<double>(c["B"]) *
           (static_cast<double>(heads) * head + 4.0 * static_cast<double>(c["HD"]));
}

Operation attention_decode(
    "attention_decode<T: f32 bf16 fp16 f64, A: arithmetic(T)>"
    "(out: T[B,NH,HD] strided, keys~: T[B,M,NKV,HD] strided, values~: T[B,M,NKV,HD] strided;"
    " q: T[B,NH,HD] strided, k: T[B,NKV,HD] strided, v: T[B,NKV,HD] strided, cis: A[M,HD/2,2],"
    " begin: i32[B] <M, end: i32[1] <M;"
    " scale: float {0.125, 0.3, 4}, window: int >=0 = 0 {0, 5, 0, 1, 64})"
    " multiple(NH, NKV)"
    " test(B=1, M=1, NH=8, NKV=1, HD=128) test(B=2, M=300, NH=4, NKV=1, HD=64)"
    " test(B=3, M=65, NH=6, NKV=2, HD=16) test(B=1, M=1000, NH=12, NKV=1, HD=32)"
    " test(B=1, M=257, NH=3, NKV=3, HD=128) test(B=2, M=300, NH=6, NKV=3, HD=64)"
    " test_large(B=2, M=5000, NH=32, NKV=8, HD=64)"
    " test_large(B=1, M=40000, NH=8, NKV=2, HD=128)",
    "attention of the next token of sequences to a cache, which its key and value go to",
    {{"cpu", "heads over threads, keys and values where they lie",
      instantiations<LLAMAC_FLOATS(attention_decode_cpu)>()},
     vectorized_attention_decode(),
     {"naive", "one thread per element", instantiations<LLAMAC_KERNELS(attention_decode_naive)>(), nullptr,
      blocks_of(256), naive_workspace},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(attention_decode_reference), attention_decode_reference<double>>()}},
    decode_flops, decode_bytes);

}  // namespace
}  // namespace llamac
