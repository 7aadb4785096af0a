// Embedding: a row of the table for every token; where positions are learned, as GPT-2's are, plus a row of their table.
//
//   out[n,c]        = weight[tokens[n],c] (+ positions[place[n],c], added before the one rounding)
//   dweight[v,c] (+)= sum over the n with tokens[n] = v of dout[n,c]
//
// The gradient of positions is the same, with place as tokens.
//
// Backward adds the rows of equal tokens in their order in fp32, and rounds each sum once: deterministic without atomics, and
// a bf16 gradient of a frequent token loses nothing.
//
// reference:  plain loops; backward holds a whole table of sums.
// cpu:        backward sorts the tokens by counting, then the threads share the vocabulary.
// naive:      forward: one thread per element; backward: one block per row of the table, which looks at all tokens.
// vectorized: forward, 128-bit accesses, the loads of several rows in flight.
// sorted:     backward, likewise. The rows of dout are sorted by their tokens; then a block writes each of its rows of the table
//             once: sums or zeros.
//
// Measured: docs/benchmarks/nvidia-h200.md.
#include <algorithm>
#include <cstring>

#include "core/device.h"
#include "core/operation.h"
#include "core/simd.h"

namespace llamac {
namespace {

template <class T>
void embedding_forward_reference(View<T, 2> out, View<const int32_t, 1> tokens, View<const T, 2> weight,
                                 View<const T, 2> positions, View<const int32_t, 1> place) {
    using A = arithmetic<T>;
    const int64_t N = out.shape[0], C = out.shape[1];
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) {
            const T row = weight(tokens(n), c);
            out(n, c) = positions ? T(A(row) + A(positions(place(n), c))) : row;
        }
}

template <class T, class G>
void embedding_backward_reference(View<G, 2> dweight, View<const T, 2> dout, View<const int32_t, 1> tokens,
                                  bool accumulate) {
    using A = arithmetic<T>;
    const int64_t N = dout.shape[0], C = dout.shape[1], V = dweight.shape[0];
    std::vector<A> sum(V * C, A(0));
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) sum[tokens(n) * C + c] += A(dout(n, c));
    for (int64_t v = 0; v < V; v++)
        for (int64_t c = 0; c < C; c++)
            dweight(v, c) = G((accumulate ? A(dweight(v, c)) : A(0)) + sum[v * C + c]);
}

template <class T>
void embedding_forward_cpu(View<T, 2> out, View<const int32_t, 1> tokens, View<const T, 2> weight,
                           View<const T, 2> positions, View<const int32_t, 1> place) {
    const int64_t N = out.shape[0], C = out.shape[1];
#pragma omp parallel for if (N > 1)
    for (int64_t n = 0; n < N; n++) {
        T* const to = &out(n, 0);
        const T *row = &weight(tokens(n), 0), *added = positions ? &positions(place(n), 0) : nullptr;
        if (!added) {
            std::memcpy(to, row, C * sizeof(T));
            continue;
        }
#pragma omp simd
        for (int64_t c = 0; c < C; c++) store(to + c, float(row[c]) + float(added[c]));
    }
}

// The rows of dout in the order of their tokens: those of token v stand at first[v] .. first[v+1]-1.
struct RowsByToken {
    std::vector<int64_t> first, row;
};
RowsByToken sort_by_token(View<const int32_t, 1> tokens, int64_t V) {
    const int64_t N = tokens.shape[0];
    RowsByToken sorted{std::vector<int64_t>(V + 1, 0), std::vector<int64_t>(N)};
    for (int64_t n = 0; n < N; n++) sorted.first[tokens(n) + 1]++;
    for (int64_t v = 0; v < V; v++) sorted.first[v + 1] += sorted.first[v];
    std::vector<int64_t> next = sorted.first;
    for (int64_t n = 0; n < N; n++) sorted.row[next[tokens(n)]++] = n;
    return sorted;
}

template <class T, class G>
void embedding_backward_cpu(View<G, 2> dweight, View<const T, 2> dout, View<const int32_t, 1> tokens,
                            bool accumulate) {
    const int64_t C = dout.shape[1], V = dweight.shape[0];
    const RowsByToken sorted = sort_by_token(tokens, V);
#pragma omp parallel
    {
        std::vector<float> sum(C);
        float* s = sum.data();
        // A frequent token makes its row dear: small pieces, handed out as threads get free.
#pragma omp for schedule(dynamic, 16)
        for (int64_t v = 0; v < V; v++) {
            G* dw = &dweight(v, 0);
            if (sorted.first[v] == sorted.first[v + 1]) {
                if (!accumulate) std::fill(dw, dw + C, G(0));
                continue;
            }
            std::fill(s, s + C, 0.0f);
            for (int64_t i = sorted.first[v]; i < sorted.first[v + 1]; i++) {
                const T* d = &dout(sorted.row[i], 0);
#pragma omp simd
                for (int64_t c = 0; c < C; c++) s[c] += float(d[c]);
            }
#pragma omp simd
            for (int64_t c = 0; c < C; c++) store(dw + c, (accumulate ? float(dw[c]) : 0.0f) + s[c]);
        }
    }
}

// ---- naive

template <class T>
__global__ void embedding_forward_naive_kernel(T* out, const int32_t* tokens, const T* weight,
                                               const T* positions, const int32_t* place, int64_t N,
                                               int64_t C) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= N * C) return;
    const T row = weight[tokens[i / C] * C + i % C];
    out[i] = positions ? T(float(row) + float(positions[place[i / C] * C + i % C])) : row;
}

template <class T>
void embedding_forward_naive(View<T, 2> out, View<const int32_t, 1> tokens, View<const T, 2> weight,
                             View<const T, 2> positions, View<const int32_t, 1> place,
                             LaunchContext context) {
    const int64_t N = out.shape[0], C = out.shape[1];
    launch(context.grid(N * C), embedding_forward_naive_kernel<T>, out.data, tokens.data, weight.data,
           positions.data, place.data, N, C);
}

// Dynamic LDS: the row's sums, C floats. A thread has its columns for itself, so that none waits.
template <class T, class G>
__global__ void embedding_backward_naive_kernel(G* dweight, const T* dout, const int32_t* tokens, int64_t N,
                                                int64_t C, bool accumulate) {
    float* sum = reinterpret_cast<float*>(dynamic_shared_memory());
    const int64_t row = blockIdx.x * C;
    bool present = false;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) sum[c] = 0;
    for (int64_t n = 0; n < N; n++) {
        if (tokens[n] != static_cast<int>(blockIdx.x)) continue;
        for (int64_t c = threadIdx.x; c < C; c += blockDim.x) sum[c] += float(dout[n * C + c]);
        present = true;
    }
    if (accumulate && !present) return;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x)
        dweight[row + c] = G((accumulate ? float(dweight[row + c]) : 0.0f) + sum[c]);
}
constexpr Constraints sums_fit{"a row of C floats in a block's LDS",
                               [](const Call& c) { return c["C"] * 4 <= device_properties().shared_bytes; }};

template <class T, class G>
void embedding_backward_naive(View<G, 2> dweight, View<const T, 2> dout, View<const int32_t, 1> tokens,
                              bool accumulate, LaunchContext context) {
    const int64_t N = dout.shape[0], C = dout.shape[1], V = dweight.shape[0];
    launch(Grid(blocks_for(V, 1), context.threads, context.stream, static_cast<size_t>(C) * 4),
           embedding_backward_naive_kernel<T, G>, dweight.data, dout.data, tokens.data, N, C, accumulate);
}

// ---- vectorized and sorted: 128-bit accesses

// The threads of a block have a vector of each row. Its part of a row is a slab; the slabs of some rows are neighbors in
// the grid.
constexpr int forward_rows = 4, table_rows = 8;
// Rows of dout that backward has under way at a time.
constexpr int rows_ahead = 4;
constexpr int copy_threads = 512;

struct Slabs {
    int threads, count;
};
// Rows of C in vectors of `size`, `wanted` threads a block, but no more whole warps than there is work for.
Slabs slabs_of(int64_t C, int size, int wanted) {
    const int64_t warp = device_properties().warp_size, vectors = (C + size - 1) / size;
    const int64_t threads = std::min<int64_t>(wanted, (vectors + warp - 1) / warp * warp);
    return {static_cast<int>(threads), static_cast<int>((vectors + threads - 1) / threads)};
}

template <class T, bool whole, bool positioned>
__global__ void __launch_bounds__(copy_threads)
    embedding_forward_vectorized_kernel(Dependent<T*> out_, Dependent<const int32_t*> tokens_,
                                        Dependent<const T*> weight_, Dependent<const T*> positions_,
                                        Dependent<const int32_t*> place_, int64_t N, int64_t C, int slabs) {
    const auto [out, tokens, weight, positions, place] =
        start_next_and_wait(out_, tokens_, weight_, positions_, place_);
    const int64_t first = int64_t{blockIdx.x / slabs} * forward_rows;
    const int64_t c = (int64_t{blockIdx.x % slabs} * blockDim.x + threadIdx.x) * vector_size<T>;
    int64_t token[forward_rows], position[positioned ? forward_rows : 1];
    uint4 row[forward_rows], added[positioned ? forward_rows : 1];
#pragma unroll
    for (int i = 0; i < forward_rows; i++) {
        const int64_t n = first + i < N ? first + i : N - 1;
        token[i] = tokens[n];
        if constexpr (positioned) position[i] = place[n];
    }
#pragma unroll
    for (int i = 0; i < forward_rows; i++) {
        row[i] = load_part<whole>(weight + token[i] * C, c, C);
        if constexpr (positioned) added[i] = load_part<whole>(positions + position[i] * C, c, C);
    }
    if constexpr (positioned) {
#pragma unroll
        for (int i = 0; i < forward_rows; i++) {
            float a[vector_size<T>], b[vector_size<T>];
            unpack<T>(row[i], a);
            unpack<T>(added[i], b);
            for (int e = 0; e < vector_size<T>; e++) a[e] += b[e];
            row[i] = pack<T>(a);
        }
    }
#pragma unroll
    for (int i = 0; i < forward_rows; i++)
        if (first + i < N) store_part<whole>(out + (first + i) * C, c, C, row[i]);
}

template <class T>
void embedding_forward_vectorized(View<T, 2> out, View<const int32_t, 1> tokens, View<const T, 2> weight,
                                  View<const T, 2> positions, View<const int32_t, 1> place,
                                  LaunchContext context) {
    using Kernel = void (*)(Dependent<T*>, Dependent<const int32_t*>, Dependent<const T*>,
                            Dependent<const T*>, Dependent<const int32_t*>, int64_t, int64_t, int);
    static constexpr Kernel kernels[2][2] = {{embedding_forward_vectorized_kernel<T, false, false>,
                                              embedding_forward_vectorized_kernel<T, false, true>},
                                             {embedding_forward_vectorized_kernel<T, true, false>,
                                              embedding_forward_vectorized_kernel<T, true, true>}};
    const int64_t N = out.shape[0], C = out.shape[1];
    const Slabs slabs = slabs_of(C, vector_size<T>, context.threads);
    const bool whole = is_whole({out.data, weight.data, positions.data}, C, vector_size<T>);
    launch(Grid(blocks_for((N + forward_rows - 1) / forward_rows * slabs.count, 1), slabs.threads,
                context.stream),
           kernels[whole][positions.data != nullptr], out.data, tokens.data, weight.data, positions.data,
           place.data, N, C, slabs.count);
}

struct Scan {
    int before, all;
};
// The sum of `value` over the block's threads before this one, and over all. warps[max_warps]: as
// block_sum's.
__device__ Scan block_scan(int value, int* warps) {
    int sum = value;
    for (int distance = 1; distance < warp_size; distance *= 2) {
        const int other = __shfl_up(sum, distance);
        if (lane_index() >= distance) sum += other;
    }
    if (lane_index() == warp_size - 1) warps[warp_index()] = sum;
    __syncthreads();
    Scan scan{sum - value, 0};
    for (int w = 0; w < static_cast<int>(blockDim.x) / warp_size; w++) {
        if (w < warp_index()) scan.before += warps[w];
        scan.all += warps[w];
    }
    return scan;
}

// Positions grouped by token: those of token v get group[first[v]] .. group[first[v+1]-1], in any order. A
// thread a token, blocks of max_threads_per_block, over V+1 (first[V] = N). Each block reads all tokens and so knows
// without the others where its groups begin.
__global__ void __launch_bounds__(max_threads_per_block)
    embedding_backward_sorted_kernel_group(Dependent<int*> first_, Dependent<int*> group_,
                                           Dependent<const int32_t*> tokens_, int N, int64_t V) {
    const auto [first, group, tokens] = wait(first_, group_, tokens_);
    struct Shared {
        int next[max_threads_per_block];  // how many, then where the next one goes
        int warps[2][max_warps];
    };
    Shared& shared = shared_memory<Shared>();
    const int64_t start = int64_t{blockIdx.x} * max_threads_per_block;
    shared.next[threadIdx.x] = 0;
    __syncthreads();
    int lower = 0;
#pragma unroll 8
    for (int64_t n = threadIdx.x; n < N; n += max_threads_per_block) {
        const int64_t token = tokens[n] - start;
        lower += token < 0;
        if (token >= 0 && token < max_threads_per_block) atomicAdd(&shared.next[token], 1);
    }
    const int begin = block_scan(lower, shared.warps[0]).all;
    const int own = begin + block_scan(shared.next[threadIdx.x], shared.warps[1]).before;
    if (start + threadIdx.x <= V) first[start + threadIdx.x] = own;
    shared.next[threadIdx.x] = own;
    __syncthreads();
    for (int64_t n = threadIdx.x; n < N; n += max_threads_per_block) {
        const int64_t token = tokens[n] - start;
        if (token >= 0 && token < max_threads_per_block)
            group[atomicAdd(&shared.next[token], 1)] = static_cast<int>(n);
    }
}

// The positions of each group in ascending order: a thread a position, which counts the lower ones.
__global__ void embedding_backward_sorted_kernel_order(Dependent<int*> ordered_, Dependent<const int*> group_,
                                                       Dependent<const int*> first_,
                                                       Dependent<const int32_t*> tokens_, int N) {
    const auto [ordered, group, first, tokens] = wait(ordered_, group_, first_, tokens_);
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= N) return;
    const int n = group[i], token = tokens[n], begin = first[token], end = first[int64_t{token} + 1];
    int lower = 0;
#pragma unroll 8
    for (int j = begin; j < end; j++) lower += group[j] < n;
    ordered[begin + lower] = n;
}

// Adds to sum the vectors at column c < C of dout's rows position[0 .. count), in this order. Each turn loads
// the rows of the next: within a turn a compiler moves a load down to its use, to save registers; into
// another it does not.
template <bool whole, class T>
__device__ void add_rows(float (&sum)[vector_size<T>], const T* dout, const int* position, int count,
                         int64_t c, int64_t C) {
    const auto load = [=](int i) {
        return i < count ? load_part<whole>(dout + position[i] * C, c, C) : make_uint4(0, 0, 0, 0);
    };
    uint4 row[rows_ahead];
#pragma unroll
    for (int i = 0; i < rows_ahead; i++) row[i] = load(i);
    for (int done = 0; done < count; done += rows_ahead) {
#pragma unroll
        for (int i = 0; i < rows_ahead; i++) {
            float x[vector_size<T>];
            unpack<T>(row[i], x);
            row[i] = load(done + rows_ahead + i);
            for (int e = 0; e < vector_size<T>; e++) sum[e] += x[e];
        }
    }
}

// dweight[c ..] (+)= sum: one vector of G, or two where T is narrower.
template <bool whole, class G, int elements>
__device__ void store_sum(G* dweight, const float (&sum)[elements], int64_t c, int64_t C, bool accumulate) {
    constexpr int size = vector_size<G>;
    static_assert(elements % size == 0);
#pragma unroll
    for (int part = 0; part < elements; part += size) {
        float x[size] = {};
        if (accumulate) unpack<G>(load_part<whole>(dweight, c + part, C), x);
        for (int e = 0; e < size; e++) x[e] += sum[part + e];
        store_part<whole>(dweight, c + part, C, pack<G>(x));
    }
}

template <bool whole, class G>
__device__ void store_zeros(G* dweight, int64_t begin, int64_t end, int64_t C) {
    constexpr int size = vector_size<G>;
    for (int64_t c = begin + threadIdx.x * size; c < end; c += int64_t{blockDim.x} * size) {
        if constexpr (whole) {
            if (c < C) store128_streaming(dweight + c, make_uint4(0, 0, 0, 0));
        } else {
            store_part<false>(dweight, c, C, make_uint4(0, 0, 0, 0));
        }
    }
}

template <class T, class G, bool whole>
__global__ void __launch_bounds__(copy_threads)
    embedding_backward_sorted_kernel(Dependent<G*> dweight_, Dependent<const T*> dout_,
                                     Dependent<const int*> ordered_, Dependent<const int*> first_, int64_t V,
                                     int64_t C, int slabs, bool accumulate) {
    const auto [dweight, dout, ordered, first] = wait(dweight_, dout_, ordered_, first_);
    constexpr int size = vector_size<T>;
    const int64_t begin_row = int64_t{blockIdx.x / slabs} * table_rows;
    const int64_t end_row = begin_row + table_rows < V ? begin_row + table_rows : V;
    const int64_t slab = int64_t{blockDim.x} * size, begin = blockIdx.x % slabs * slab;
    const int64_t c = begin + threadIdx.x * size;
    int next = first[begin_row];
    for (int64_t v = begin_row; v < end_row; v++) {
        const int from = next;
        next = first[v + 1];
        if (from < next) {
            if (c >= C) continue;  // no load below has to ask
            float sum[size] = {};
            add_rows<whole>(sum, dout, ordered + from, next - from, c, C);
            store_sum<whole>(dweight + v * C, sum, c, C, accumulate);
        } else if (!accumulate) {
            store_zeros<whole>(dweight + v * C, begin, begin + slab, C);
        }
    }
}

// Positions are ints.
constexpr Constraints positions_fit{"N below 2^31", [](const Call& c) { return c["N"] < int64_t{1} << 31; }};
// first[V+1], group[N], ordered[N]
int64_t backward_workspace(const Call& c) {
    return (c["V"] + 1 + 2 * c["N"]) * 4;
}

template <class T, class G>
void embedding_backward_sorted(View<G, 2> dweight, View<const T, 2> dout, View<const int32_t, 1> tokens,
                               bool accumulate, LaunchContext context) {
    const int64_t N = dout.shape[0], C = dout.shape[1], V = dweight.shape[0];
    int *first = static_cast<int*>(context.workspace), *group = first + V + 1, *ordered = group + N;
    launch(Grid(blocks_for(V + 1, max_threads_per_block), max_threads_per_block, context.stream),
           embedding_backward_sorted_kernel_group, first, group, tokens.data, static_cast<int>(N), V);
    launch(context.grid(N), embedding_backward_sorted_kernel_order, ordered, group, first, tokens.data,
           static_cast<int>(N));
    const Slabs slabs = slabs_of(C, vector_size<T>, context.threads);
    const bool whole = is_whole({dweight.data, dout.data}, C, std::max(vector_size<T>, vector_size<G>));
    launch(
        Grid(blocks_for((V + table_rows - 1) / table_rows * slabs.count, 1), slabs.threads, context.stream),
        whole ? embedding_backward_sorted_kernel<T, G, true> : embedding_backward_sorted_kernel<T, G, false>,
        dweight.data, dout.data, ordered, first, V, C, slabs.count, accumulate);
}

constexpr BlockSizes block_sizes = blocks_of(256, 128, 512);

// Counts only the rows of the table that are read, and each position once.
double embedding_forward_bytes(const Call& c) {
    const int64_t out = c.operand("out").bytes(), tokens = c.operand("tokens").bytes();
    const Tensor& positions = c.operand("positions");
    const int64_t added = positions.data ? std::min(out, positions.bytes()) + tokens : 0;
    return static_cast<double>(2 * out + tokens + added);
}

Operation embedding_forward(
    "embedding_forward<T: f32 bf16 fp16 f64>"
    "(out: T[N,C]; tokens: i32[N] <V, weight: T[V,C], positions?: T[M,C], place?: i32[N] <M with(positions))"
    " rows(N) empty(N) test(N=9, V=40, C=4096, M=5)"
    " derivative embedding_backward(dweight: grad weight; dout: grad out, tokens)"
    " derivative embedding_backward(dweight: grad positions; dout: grad out, tokens: place)",
    "out = weight[tokens] + positions[place]",
    {{"cpu", "rows over threads", instantiations<LLAMAC_FLOATS(embedding_forward_cpu)>()},
     {"vectorized", "rows in 128-bit accesses, several in flight",
      instantiations<LLAMAC_KERNELS(embedding_forward_vectorized)>(), nullptr, block_sizes},
     {"naive", "one thread per element", instantiations<LLAMAC_KERNELS(embedding_forward_naive)>(), nullptr,
      block_sizes},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(embedding_forward_reference), embedding_forward_reference<double>>()}},
    nullptr,  // FLOPs: a sum of two that is rounded once is exact, as a copy is
    embedding_forward_bytes);

Operation embedding_backward(
    "embedding_backward<T: f32 bf16 fp16 f64, G: f32 bf16 f64>"
    "(dweight: G[V,C] adds_if(accumulate); dout: T[N,C], tokens: i32[N] <V; accumulate: "
    "bool)"
    " rows(N) empty(N) test(N=9, V=40, C=4096)",
    "dweight[tokens] += dout, the rows of a token added before they are rounded",
    {{"cpu", "tokens sorted, vocabulary over threads",
      instantiations<LLAMAC_FLOATS(embedding_backward_cpu, float), embedding_backward_cpu<bf16, bf16>>()},
     {"sorted", "positions sorted by token, each row of the table written once in 128-bit accesses",
      instantiations<LLAMAC_KERNELS(embedding_backward_sorted, float),
                     embedding_backward_sorted<bf16, bf16>>(),
      positions_fit, block_sizes, backward_workspace},
     {"naive", "one block per row of the table looks at all tokens",
      instantiations<LLAMAC_KERNELS(embedding_backward_naive, float), embedding_backward_naive<bf16, bf16>>(),
      sums_fit, block_sizes},
     {"reference", "plain loops",
      instantiations<LLAMAC_FLOATS(embedding_backward_reference, float),
                     embedding_backward_reference<bf16, bf16>,
                     embedding_backward_reference<double, double>>()}},
    [](const Call& c) { return 1.0 * c["N"] * c["C"]; });

}  // namespace
}  // namespace llamac
