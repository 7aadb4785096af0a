// Attention of the next token: variant `vectorized` of decode.hip. Blocks share the keys of a sequence; within a block, groups of
// lanes hold a key each, 16 bytes per lane: two keys and values per group are in flight. One reading serves the query heads that
// share a key/value head. Groups, warps and blocks have running softmaxes of their own (Dao et al., Flash-Decoding, 2023), added
// in a fixed order; a second kernel adds the blocks'.
#include <algorithm>
#include <cmath>

#include "core/device.h"
#include "ops/attention/decode.h"
#include "ops/rope.h"

namespace llamac {
namespace {

constexpr int block_threads = 128;
constexpr int keys_in_flight = 2;     // of a group of lanes
constexpr int parts_in_flight = 16;   // of a thread that joins them
constexpr int max_heads = 4;          // query heads that one reading serves
constexpr int64_t max_splits = 64;    // blocks that share out a sequence's keys
constexpr int blocks_per_device = 4;  // times its multiprocessors, where there are as many keys

constexpr float log2_e = 1.44269504088896341f;

// The keys before `end`, shared out over at most `splits` blocks, each with a multiple of `step`; the last of them has the
// new key too.
struct Share {
    int chunk, active;

    __device__ Share(const DecodePlace& place, int splits, int step) {
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
    unpack<T>(load128(head + c), own);
    unpack<T>(load128(head + (c < half ? c + half : pair)), other);
#pragma unroll
    for (int i = 0; i < 2 * size; i += 4) {
        float angles[4];
        unpack<float>(load128(cis + 2 * pair + i), angles);
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

    // weights of the old and the new part, relative to the larger of the two largest scores
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
    attention_decode_vectorized_kernel(Dependent<float*> partial_, Dependent<DecodeOperands<T>> operands_,
                                       int64_t S, int64_t window, int HD, int group, float scale) {
    const auto [partial, o] = start_next_and_wait(partial_, operands_);
    constexpr int size = vector_size<T>;
    const int lanes = HD / size, groups = warp_size / lanes, warps = static_cast<int>(blockDim.x) / warp_size;
    const int c = lane_index() % lanes * size, slots = warps * groups,
              slot = warp_index() * groups + lane_index() / lanes;
    const int64_t b = blockIdx.z, head = int64_t{blockIdx.y} * heads_, kv = head / group;
    const DecodePlace place(o.begin, o.end, b, S, window);
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
            unpack<T>(keys[u], key);
            unpack<T>(values[u], v[u]);
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
        const uint4 rounded = pack<T>(key);
        unpack<T>(rounded, key);
        const uint4 value = load128(o.v.at(b, kv) + c);
        unpack<T>(value, v[0]);
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
__global__ void attention_decode_vectorized_kernel_join(Dependent<DecodeOperands<T>> operands_,
                                                        Dependent<const float*> partial_, int64_t S,
                                                        int64_t window, int HD, int splits, int step) {
    const auto [o, partial] = start_next_and_wait(operands_, partial_);
    const int d = static_cast<int>(threadIdx.x);
    const int64_t b = blockIdx.y, h = blockIdx.x;
    if (d >= HD) return;
    const Share share(DecodePlace(o.begin, o.end, b, S, window), splits, step);
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
    while (count < max_heads && group % (2 * count) == 0) count *= 2;
    return count;
}
int splits_of(int64_t B, int64_t NH, int64_t NKV) {
    const int64_t others = B * NH / heads_per_block(NH / NKV);
    const int64_t wanted = int64_t{blocks_per_device} * device_properties().multiprocessors / others;
    return static_cast<int>(std::clamp<int64_t>(wanted, 1, max_splits));
}

int64_t decode_workspace(const Call& c) {
    return 4 * c["B"] * c["NH"] * splits_of(c["B"], c["NH"], c["NKV"]) * (c["HD"] + 2);
}

bool decode_supports(const Call& c) {
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

template <class T>
void attention_decode_vectorized(View<T, 3> out, View<T, 4> keys, View<T, 4> values, View<const T, 3> q,
                                 View<const T, 3> k, View<const T, 3> v, View<const float, 3> cis,
                                 View<const int32_t, 1> begin, View<const int32_t, 1> end, double scale,
                                 int64_t window, LaunchContext context) {
    const int64_t B = q.shape[0], NH = q.shape[1], HD = q.shape[2], NKV = k.shape[1], S = keys.shape[1];
    const DecodeOperands<T> o{row_heads(out), heads(keys), heads(values), row_heads(q), row_heads(k),
                              row_heads(v),   cis.data,    begin.data,    end.data};
    float* const partial = static_cast<float*>(context.workspace);
    const int splits = splits_of(B, NH, NKV), count = heads_per_block(NH / NKV);
    const int warps = block_threads / device_properties().warp_size;
    const int64_t step = block_threads * vector_size<T> / HD * keys_in_flight;
    using Kernel =
        void (*)(Dependent<float*>, Dependent<DecodeOperands<T>>, int64_t, int64_t, int, int, float);
    static constexpr Kernel kernels[] = {attention_decode_vectorized_kernel<T, 1>,
                                         attention_decode_vectorized_kernel<T, 2>,
                                         attention_decode_vectorized_kernel<T, 4>};
    const size_t shared = static_cast<size_t>(warps * count * (HD + 2) * 4);
    launch(
        Grid(dim3(static_cast<unsigned>(splits), static_cast<unsigned>(NH / count), static_cast<unsigned>(B)),
             block_threads, context.stream, shared),
        kernels[count / 2], partial, o, S, window, HD, NH / NKV, scale);
    launch(Grid(dim3(static_cast<unsigned>(NH), static_cast<unsigned>(B)),
                blocks_for(HD, device_properties().warp_size) *
                    static_cast<unsigned>(device_properties().warp_size),
                context.stream),
           attention_decode_vectorized_kernel_join<T>, o, partial, S, window, HD, splits, step);
}

}  // namespace

Variant vectorized_attention_decode() {
    return {"vectorized",
            "keys shared out over blocks and groups of lanes, 128-bit accesses",
            instantiations<LLAMAC_KERNELS(attention_decode_vectorized)>(),
            Constraints{
                "heads of 2, 4, 8, ... vectors of 16 bytes, up to as many as a warp has lanes, that begin at "
                "multiples of 16 bytes, M at most 2^30",
                decode_supports},
            blocks_of(256),
            decode_workspace};
}

}  // namespace llamac
