// Attention of the next token of each of B sequences whose keys and values a cache holds; its own go there first. All
// sequences end at the same position of the cache, end[0], where the new keys and values stand; sequence b begins at
// begin[b], and its rotary positions begin at 0 there. With p = end[0] - begin[b], and rope() as rope_forward computes
// it, half split; keys are rounded to the storage type, queries are not:
//
//   keys[b,end,h,:]   = rope(k[b,h,:], cis[p])
//   values[b,end,h,:] = v[b,h,:]
//   out[b,h,:]        = sum_s p[s] * values[b,s,g,:],  p = softmax over s of scale * rope(q[b,h,:], cis[p]) keys[b,s,g,:]
//
// with g = h / (NH/NKV), over the positions s from begin[b] to end[0], the last `window` of them where window is not 0. All of
// keys and values but position end stays as it is. begin and end are in the device's memory, so that one captured graph
// serves every token. A begin behind end counts as end: nobody checks a device's values.
//
// reference:  plain loops.
// cpu:        heads over threads, keys and values where they lie (one_query.h).
// naive:      a kernel that turns and stores, then one thread per element of out.
// vectorized: the keys of a sequence are shared out over blocks, and a block's over groups of lanes that hold a key by 16
//             bytes each: two keys and values per group are in flight. The query heads that share a key/value head are
//             served by one reading. Groups, warps and blocks have running softmaxes of their own (Dao et al., Flash-Decoding,
//             2023), added in a fixed order; a second kernel adds the blocks'.
//
// Measured: docs/benchmarks/nvidia-h200.md.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/device.h"
#include "core/operation.h"
#include "ops/attention/one_query.h"
#include "ops/rope.h"

namespace llamac {
namespace {

// What the next token of a sequence sees: positions [from, end] of the cache; `rotary` is its own.
struct Place {
    int64_t from, end, rotary;

    __host__ __device__ Place(const int32_t* begins, const int32_t* ends, int64_t b, int64_t S,
                              int64_t window) {
        const int64_t last = ends[0], first = begins[b];
        end = last < 0 ? 0 : last < S ? last : S - 1;
        const int64_t begin = first < 0 ? 0 : first < end ? first : end;
        rotary = end - begin;
        from = window > 0 && end - window + 1 > begin ? end - window + 1 : begin;
    }
};

template <class T>
void attention_next_reference(View<T, 3> out, View<T, 4> keys, View<T, 4> values, View<const T, 3> q,
                              View<const T, 3> k, View<const T, 3> v, View<const arithmetic<T>, 3> cis,
                              View<const int32_t, 1> begin, View<const int32_t, 1> end, double scale,
                              int64_t window) {
    using A = arithmetic<T>;
    const int64_t B = q.shape[0], NH = q.shape[1], HD = q.shape[2], NKV = k.shape[1], half = HD / 2;
    std::vector<A> p(keys.shape[1]), query(HD);
    std::vector<double> sums(HD);
    for (int64_t b = 0; b < B; b++) {
        const Place place(begin.data, end.data, b, keys.shape[1], window);
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
void attention_next_cpu(View<T, 3> out, View<T, 4> keys, View<T, 4> values, View<const T, 3> q,
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
        const Place place(begin.data, end.data, b, S, window);
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
            const Place place(begin.data, end.data, b, S, window);
            const int64_t g = h / (NH / NKV);
            const one_query::Seen<T> of{
                &keys(b, place.from, g, 0), &values(b, place.from, g, 0), keys.stride[1],
                values.stride[1],           place.end + 1 - place.from,   HD};
            one_query::attend(&out(b, h, 0), queries + (b * NH + h) * HD, of, static_cast<float>(scale),
                              one_query::scratch_of<float>(of.count, HD));
        }
}

// ---- naive

// Where heads [B,NH,HD] lie.
template <class T>
struct RowHeads {
    T* data;
    int64_t stride_b, stride_h;

    __device__ T* at(int64_t b, int64_t h) const { return data + b * stride_b + h * stride_h; }
};
template <class T>
RowHeads<T> row_heads(const View<T, 3>& x) {
    return {x.data, x.stride[0], x.stride[1]};
}

template <class T>
struct Operands {
    RowHeads<T> out;
    Heads<T> keys, values;
    RowHeads<const T> q, k, v;
    const float* cis;
    const int32_t *begin, *end;
};

// One thread per pair of channels of a query or key head; queries [B,NH,HD].
template <class T>
__global__ void attention_next_naive_kernel_turn(float* queries, Operands<T> o, int64_t B, int64_t NH,
                                                 int64_t NKV, int64_t half, int64_t S) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, j = i % half, h = i / half % (NH + NKV),
                  b = i / half / (NH + NKV);
    if (b >= B) return;
    const Place place(o.begin, o.end, b, S, 0);
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
__global__ void attention_next_naive_kernel(const float* queries, Operands<T> o, int64_t B, int64_t NH,
                                            int64_t NKV, int64_t HD, int64_t S, float scale, int64_t window) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, d = i % HD, h = i / HD % NH,
                  b = i / HD / NH, g = h / (NH / NKV);
    if (b >= B) return;
    const Place place(o.begin, o.end, b, S, window);
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
void attention_next_naive(View<T, 3> out, View<T, 4> keys, View<T, 4> values, View<const T, 3> q,
                          View<const T, 3> k, View<const T, 3> v, View<const float, 3> cis,
                          View<const int32_t, 1> begin, View<const int32_t, 1> end, double scale,
                          int64_t window, LaunchContext context) {
    const int64_t B = q.shape[0], NH = q.shape[1], HD = q.shape[2], NKV = k.shape[1], S = keys.shape[1];
    const Operands<T> o{row_heads(out), heads(keys), heads(values), row_heads(q), row_heads(k),
                        row_heads(v),   cis.data,    begin.data,    end.data};
    float* const queries = static_cast<float*>(context.workspace);
    launch(Grid(blocks_for(B * (NH + NKV) * HD / 2, context.threads), context.threads, context.stream),
           attention_next_naive_kernel_turn<T>, queries, o, B, NH, NKV, HD / 2, S);
    launch(Grid(blocks_for(B * NH * HD, context.threads), context.threads, context.stream),
           attention_next_naive_kernel<T>, queries, o, B, NH, NKV, HD, S, scale, window);
}

// ---- vectorized: keys shared out over blocks and groups of lanes

constexpr int block_threads = 128;
constexpr int keys_in_flight = 2;     // of a group of lanes
constexpr int parts_in_flight = 16;   // of a thread that joins them
constexpr int most_heads = 4;         // query heads that one reading serves
constexpr int64_t most_splits = 64;   // blocks that share out a sequence's keys
constexpr int blocks_per_device = 4;  // times its multiprocessors, where there are as many keys

constexpr float log2_e = 1.44269504088896341f;

// The keys before `end`, shared out over at most `splits` blocks, each with a multiple of `step`; the last of them has the
// new key too.
struct Share {
    int chunk, active;

    __device__ Share(const Place& place, int splits, int step) {
        const int keys = static_cast<int>(place.end - place.from), even = (keys + splits - 1) / splits;
        chunk = even <= step ? step : (even + step - 1) / step * step;
        active = keys <= chunk ? 1 : (keys + chunk - 1) / chunk;
    }
};

// `size` channels of a head from c on, turned.
template <class T, int size>
__device__ void load_turned(float (&x)[size], const T* head, const float* cis, int c, int half) {
    const int pair = c < half ? c : c - half;
    float own[size], other[size], turn[2 * size];
    unpack(load128(head + c), own);
    unpack(load128(head + (c < half ? c + half : pair)), other);
#pragma unroll
    for (int i = 0; i < 2 * size; i += 4) {
        float angles[4];
        unpack(load128(cis + 2 * pair + i), angles);
        for (int j = 0; j < 4; j++) turn[i + j] = angles[j];
    }
#pragma unroll
    for (int i = 0; i < size; i++) {
        const float s = c < half ? -turn[2 * i + 1] : turn[2 * i + 1];
        x[i] = rotated(own[i], other[i], turn[2 * i], s);
    }
}

// A running softmax of one query head: scores are in powers of two.
template <int size>
struct Running {
    float largest = -INFINITY, sum = 0, total[size] = {};

    // weights of what is there and of what comes, relative to the larger of the two largest scores
    __device__ void grow(float to, float& before, float& shift) {
        const float now = fmaxf(largest, to);
        shift = now == -INFINITY ? 0 : now;
        before = fast_exp2(largest - shift);
        largest = now;
    }
    __device__ void add(const Running& other) {
        float before, shift;
        const float its = other.largest;
        grow(its, before, shift);
        const float weight = fast_exp2(its - shift);
        sum = sum * before + other.sum * weight;
#pragma unroll
        for (int i = 0; i < size; i++) total[i] = total[i] * before + other.total[i] * weight;
    }
};

// keys: scores of `count` keys, -inf where a lane has none, and their values.
template <int size, int count>
__device__ void add_keys(Running<size>& running, const float (&scores)[count],
                         const float (&values)[count][size]) {
    float largest = scores[0], before, shift, p[count];
#pragma unroll
    for (int u = 1; u < count; u++) largest = fmaxf(largest, scores[u]);
    running.grow(largest, before, shift);
    running.sum *= before;
#pragma unroll
    for (int u = 0; u < count; u++) running.sum += p[u] = fast_exp2(scores[u] - shift);
#pragma unroll
    for (int i = 0; i < size; i++) {
        float total = running.total[i] * before;
#pragma unroll
        for (int u = 0; u < count; u++) total = fmaf(p[u], values[u][i], total);
        running.total[i] = total;
    }
}

// The sum over groups of `lanes` lanes, in each of them.
__device__ inline float group_sum(float value, int lanes) {
#pragma unroll
    for (int distance = warp_size / 2; distance > 0; distance /= 2)
        if (distance < lanes) value += __shfl_xor(value, distance);
    return value;
}

// A partial result: largest, sum, total[HD].
__device__ inline int64_t partial_size(int HD) {
    return HD + 2;
}

// Blocks (x: shares of the keys, y: heads_ query heads each, of one key/value head, z: sequences). partial: [B,NH,splits]
// partial results. Dynamic LDS: one for each warp and head. The new key and value are in registers where they are
// needed, as another block stores them.
template <class T, int heads_>
__global__ void __launch_bounds__(block_threads)
    attention_next_vectorized_kernel(Dependent<float*> partial_, Dependent<Operands<T>> operands_, int64_t S,
                                     int64_t window, int HD, int group, float scale) {
    const auto [partial, o] = start_next_and_wait(partial_, operands_);
    constexpr int size = vector_size<T>;
    const int lanes = HD / size, groups = warp_size / lanes, warps = static_cast<int>(blockDim.x) / warp_size;
    const int c = lane_index() % lanes * size, slots = warps * groups,
              slot = warp_index() * groups + lane_index() / lanes;
    const int64_t b = blockIdx.z, head = int64_t{blockIdx.y} * heads_, kv = head / group;
    const Place place(o.begin, o.end, b, S, window);
    const Share share(place, static_cast<int>(gridDim.x), slots * keys_in_flight);
    const int split = static_cast<int>(blockIdx.x);
    if (split >= share.active) return;
    const int64_t from = place.from + int64_t{split} * share.chunk;
    const int64_t until = from + share.chunk < place.end ? from + share.chunk : place.end;
    const float* cis = o.cis + place.rotary * HD;

    float q[heads_][size];
#pragma unroll
    for (int h = 0; h < heads_; h++) {
        load_turned(q[h], o.q.at(b, head + h), cis, c, HD / 2);
        for (int i = 0; i < size; i++) q[h][i] *= scale * log2_e;
    }
    Running<size> running[heads_];
    const auto score = [&](int h, const float (&key)[size]) {
        float dot = 0;
        for (int i = 0; i < size; i++) dot = fmaf(q[h][i], key[i], dot);
        return group_sum(dot, lanes);
    };
    for (int64_t first = from; first < until; first += int64_t{slots} * keys_in_flight) {
        uint4 keys[keys_in_flight], values[keys_in_flight];
#pragma unroll
        for (int u = 0; u < keys_in_flight; u++) {
            const int64_t s = first + u * slots + slot;
            keys[u] = s < until ? load128(o.keys.at(b, s, kv) + c) : make_uint4(0, 0, 0, 0);
            values[u] = s < until ? load128(o.values.at(b, s, kv) + c) : make_uint4(0, 0, 0, 0);
        }
        float scores[heads_][keys_in_flight], v[keys_in_flight][size];
#pragma unroll
        for (int u = 0; u < keys_in_flight; u++) {
            float key[size];
            unpack(keys[u], key);
            unpack(values[u], v[u]);
#pragma unroll
            for (int h = 0; h < heads_; h++) {
                const float own = score(h, key);
                scores[h][u] = first + u * slots + slot < until ? own : -INFINITY;
            }
        }
#pragma unroll
        for (int h = 0; h < heads_; h++) add_keys(running[h], scores[h], v);
    }
    if (split == share.active - 1) {
        float key[size], v[1][size];
        load_turned(key, o.k.at(b, kv), cis, c, HD / 2);
        const uint4 rounded = pack(key);
        unpack(rounded, key);
        const uint4 value = load128(o.v.at(b, kv) + c);
        unpack(value, v[0]);
        if (slot == 0 && head % group == 0) {
            store128(o.keys.at(b, place.end, kv) + c, rounded);
            store128(o.values.at(b, place.end, kv) + c, value);
        }
#pragma unroll
        for (int h = 0; h < heads_; h++) {
            const float own = score(h, key), scores[1] = {slot == 0 ? own : -INFINITY};
            add_keys(running[h], scores, v);
        }
    }

    float* const shared = reinterpret_cast<float*>(dynamic_shared_memory());
#pragma unroll
    for (int h = 0; h < heads_; h++) {
        for (int distance = lanes; distance < warp_size; distance *= 2) {
            Running<size> other;
            other.largest = __shfl_xor(running[h].largest, distance);
            other.sum = __shfl_xor(running[h].sum, distance);
#pragma unroll
            for (int i = 0; i < size; i++) other.total[i] = __shfl_xor(running[h].total[i], distance);
            running[h].add(other);
        }
        float* const own = shared + (warp_index() * heads_ + h) * partial_size(HD);
        if (lane_index() >= lanes) continue;
        if (lane_index() == 0) own[0] = running[h].largest, own[1] = running[h].sum;
#pragma unroll
        for (int i = 0; i < size; i++) own[2 + c + i] = running[h].total[i];
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < heads_ * HD; i += static_cast<int>(blockDim.x)) {
        const int h = i / HD, d = i % HD;
        Running<1> all;
        for (int w = 0; w < warps; w++) {
            const float* from_warp = shared + (w * heads_ + h) * partial_size(HD);
            Running<1> part;
            part.largest = from_warp[0], part.sum = from_warp[1], part.total[0] = from_warp[2 + d];
            all.add(part);
        }
        const int64_t row = (b * gridDim.y * heads_ + head + h) * gridDim.x + blockIdx.x;
        float* const to = partial + row * partial_size(HD);
        if (d == 0) to[0] = all.largest, to[1] = all.sum;
        to[2 + d] = all.total[0];
    }
}

// Blocks (x: query heads, y: sequences), a thread per channel. step: as the kernel above shares keys out.
template <class T>
__global__ void attention_next_vectorized_kernel_join(Dependent<Operands<T>> operands_,
                                                      Dependent<const float*> partial_, int64_t S,
                                                      int64_t window, int HD, int splits, int step) {
    const auto [o, partial] = start_next_and_wait(operands_, partial_);
    const int d = static_cast<int>(threadIdx.x);
    const int64_t b = blockIdx.y, h = blockIdx.x;
    if (d >= HD) return;
    const Share share(Place(o.begin, o.end, b, S, window), splits, step);
    const float* const parts = partial + (b * gridDim.x + h) * splits * partial_size(HD);
    Running<1> all;
    for (int first = 0; first < share.active; first += parts_in_flight) {
        float scores[parts_in_flight], sums[parts_in_flight], totals[parts_in_flight];
#pragma unroll
        for (int u = 0; u < parts_in_flight; u++) {
            // One that exists in any case: a branch around each load costs gfx942 more registers than it has.
            const float* const part = parts + (first + u < share.active ? first + u : 0) * partial_size(HD);
            scores[u] = part[0];
            sums[u] = part[1];
            totals[u] = part[2 + d];
        }
#pragma unroll
        for (int u = 0; u < parts_in_flight; u++)
            if (first + u < share.active) all.add({scores[u], sums[u], {totals[u]}});
    }
    o.out.at(b, h)[d] = T(all.total[0] / all.sum);
}

// Query heads that a block serves: of one key/value head, a power of two.
int heads_per_block(int64_t group) {
    int count = 1;
    while (count < most_heads && group % (2 * count) == 0) count *= 2;
    return count;
}
int splits_of(int64_t B, int64_t NH, int64_t NKV) {
    const int64_t others = B * NH / heads_per_block(NH / NKV);
    const int64_t wanted = int64_t{blocks_per_device} * device_properties().multiprocessors / others;
    return static_cast<int>(std::clamp<int64_t>(wanted, 1, most_splits));
}
int64_t vectorized_workspace(const Call& c) {
    return 4 * c["B"] * c["NH"] * splits_of(c["B"], c["NH"], c["NKV"]) * (c["HD"] + 2);
}

bool fits_lanes(const Call& c) {
    const int64_t size = 16 / size_of(c.operand("q").dtype), lanes = c["HD"] / size;
    bool whole = c["HD"] % size == 0 && lanes >= 2 && (lanes & (lanes - 1)) == 0 &&
                 lanes <= device_properties().warp_size && c["M"] <= 1 << 30 &&
                 is_whole({c.operand("cis").data}, 0, 4);
    for (const char* name : {"keys", "values", "q", "k", "v"}) {
        const Tensor& t = c.operand(name);
        whole &= is_whole({t.data}, 0, 1);
        for (int d = 0; d + 1 < t.rank; d++) whole &= t.shape[d] == 1 || t.stride[d] % size == 0;
    }
    return whole;
}
constexpr Constraints vectorized_constraints{
    "heads of 2, 4, 8, ... vectors of 16 bytes, up to as many as a warp has lanes, that begin at "
    "multiples of 16 bytes, M at most 2^30",
    fits_lanes};

template <class T>
void attention_next_vectorized(View<T, 3> out, View<T, 4> keys, View<T, 4> values, View<const T, 3> q,
                               View<const T, 3> k, View<const T, 3> v, View<const float, 3> cis,
                               View<const int32_t, 1> begin, View<const int32_t, 1> end, double scale,
                               int64_t window, LaunchContext context) {
    const int64_t B = q.shape[0], NH = q.shape[1], HD = q.shape[2], NKV = k.shape[1], S = keys.shape[1];
    const Operands<T> o{row_heads(out), heads(keys), heads(values), row_heads(q), row_heads(k),
                        row_heads(v),   cis.data,    begin.data,    end.data};
    float* const partial = static_cast<float*>(context.workspace);
    const int splits = splits_of(B, NH, NKV), count = heads_per_block(NH / NKV);
    const int warps = block_threads / device_properties().warp_size;
    const int64_t step = block_threads * vector_size<T> / HD * keys_in_flight;
    using Kernel = void (*)(Dependent<float*>, Dependent<Operands<T>>, int64_t, int64_t, int, int, float);
    static constexpr Kernel kernels[] = {attention_next_vectorized_kernel<T, 1>,
                                         attention_next_vectorized_kernel<T, 2>,
                                         attention_next_vectorized_kernel<T, 4>};
    const size_t shared = static_cast<size_t>(warps * count * (HD + 2) * 4);
    launch(
        Grid(dim3(static_cast<unsigned>(splits), static_cast<unsigned>(NH / count), static_cast<unsigned>(B)),
             block_threads, context.stream, shared),
        kernels[count / 2], partial, o, S, window, HD, NH / NKV, scale);
    launch(Grid(dim3(static_cast<unsigned>(NH), static_cast<unsigned>(B)),
                blocks_for(HD, device_properties().warp_size) *
                    static_cast<unsigned>(device_properties().warp_size),
                context.stream),
           attention_next_vectorized_kernel_join<T>, o, partial, S, window, HD, splits, step);
}

// Every position may be seen.
double next_flops(const Call& c) {
    return 4.0 * static_cast<double>(c["B"] * c["NH"]) * static_cast<double>(c["M"] * c["HD"]);
}
// Of the cache, the new position is only written, all others are only read; of cis, a row is read.
double next_bytes(const Call& c) {
    const int64_t heads = 2 * ((c["M"] + 1) * c["NKV"] + c["NH"]);
    const double head = static_cast<double>(c["HD"] * size_of(c.operand("q").dtype));
    return static_cast<double>(c["B"]) *
           (static_cast<double>(heads) * head + 4.0 * static_cast<double>(c["HD"]));
}

Operation attention_next(
    "attention_next<T: f32 bf16 f64, A: arithmetic(T)>"
    "(out: T[B,NH,HD] strided, keys~: T[B,M,NKV,HD] strided, values~: T[B,M,NKV,HD] strided;"
    " q: T[B,NH,HD] strided, k: T[B,NKV,HD] strided, v: T[B,NKV,HD] strided, cis: A[M,HD/2,2],"
    " begin: i32[B] <M, end: i32[1] <M;"
    " scale: float {0.125, 0.3, 4}, window: int >=0 = 0 {0, 5, 0, 1, 64})"
    " multiple(NH, NKV)"
    " test(B=1, M=1, NH=8, NKV=1, HD=128) test(B=2, M=300, NH=4, NKV=1, HD=64)"
    " test(B=3, M=65, NH=6, NKV=2, HD=16) test(B=1, M=1000, NH=12, NKV=1, HD=32)"
    " test(B=1, M=257, NH=3, NKV=3, HD=128) test_large(B=2, M=5000, NH=32, NKV=8, HD=64)"
    " test_large(B=1, M=40000, NH=8, NKV=2, HD=128)",
    "attention of the next token of sequences to a cache, which its key and value go to",
    {{"cpu", "heads over threads, keys and values where they lie", Backend::host,
      instantiations<attention_next_cpu<float>, attention_next_cpu<bf16>>()},
     {"vectorized",
      "keys shared out over blocks and groups of lanes, 128-bit accesses",
      Backend::device,
      instantiations<attention_next_vectorized<float>, attention_next_vectorized<bf16>>(),
      vectorized_constraints,
      {},
      vectorized_workspace},
     {"naive",
      "one thread per element",
      Backend::device,
      instantiations<attention_next_naive<float>, attention_next_naive<bf16>>(),
      nullptr,
      {},
      naive_workspace},
     {"reference", "plain loops", Backend::host,
      instantiations<attention_next_reference<float>, attention_next_reference<bf16>,
                     attention_next_reference<double>>()}},
    next_flops, next_bytes);

}  // namespace
}  // namespace llamac
