// The forward product of one row, for a sequence that grows token by token: variant `vectorized` of matmul.hip. The time is that
// of reading the weight once. One to four warps own a row of it, the more the longer it is, so that most of it is in flight at
// once, by 128-bit accesses; x comes from the first cache. Bringing the weight into the last cache before a block waits for x
// did not help in a chain of such products (docs/log/gemm.md).
#include <algorithm>

#include "core/device.h"
#include "ops/matmul/matmul.h"

namespace llamac {
namespace {

constexpr int max_block_threads = 512;
constexpr int vectors_in_flight = 8;  // of a lane
constexpr int64_t max_split = 4;      // warps that share out a row of the weight

// split: warps per row of the weight, each with `share` columns.
template <class T>
__global__ void __launch_bounds__(max_block_threads)
    matmul_forward_vectorized_kernel(Dependent<T*> out_, Dependent<const T*> x_, Dependent<const T*> weight_,
                                     Dependent<const T*> residual_, Dependent<const T*> bias_, int64_t C,
                                     int64_t K, int64_t share, int split) {
    constexpr int size = vector_size<T>;
    struct Shared {
        float sums[max_block_threads / warp_size];
    };
    const int rows = static_cast<int>(blockDim.x) / warp_size / split, part = warp_index() % split;
    const int64_t k = int64_t{blockIdx.x} * rows + warp_index() / split;
    const int64_t begin = part * share, rest = k < K ? C - begin : 0, count = rest < share ? rest : share;
    const auto [out, x, weight, residual, bias] = start_next_and_wait(out_, x_, weight_, residual_, bias_);
    const T* row = weight + k * C + begin;

    float sum = 0;
    for (int64_t base = 0; base < count; base += vectors_in_flight * warp_size * size) {
        const int64_t first = base + lane_index() * size;
        uint4 bits[vectors_in_flight];
#pragma unroll
        for (int u = 0; u < vectors_in_flight; u++) {
            const int64_t c = first + u * warp_size * size;
            bits[u] = c < count ? load128_streaming(row + c) : make_uint4(0, 0, 0, 0);
        }
        issue_loads();  // all of them before the first of x
#pragma unroll
        for (int u = 0; u < vectors_in_flight; u++) {
            float w[size], values[size];
            unpack<T>(bits[u], w);
            unpack<T>(load_part<true>(x + begin, first + u * warp_size * size, count), values);
#pragma unroll
            for (int i = 0; i < size; i++) sum = fmaf(values[i], w[i], sum);
        }
    }
    sum = warp_sum(sum);
    if (split > 1) {
        Shared& shared = shared_memory<Shared>();
        if (lane_index() == 0) shared.sums[warp_index()] = sum;
        __syncthreads();
        for (int i = 1; part == 0 && i < split; i++) sum += shared.sums[warp_index() + i];
    }
    if (part != 0 || lane_index() != 0 || k >= K) return;
    if (residual) sum += float(residual[k]);
    if (bias) sum += float(bias[k]);
    out[k] = T(sum);
}

template <class T>
void matmul_forward_vectorized(View<T, 2> out, View<const T, 2> x, View<const T, 2> weight,
                               View<const T, 2> residual, View<const T, 1> bias, LaunchContext context) {
    const int64_t C = x.shape[1], K = weight.shape[0], vectors = C / vector_size<T>;
    const int64_t warp = device_properties().warp_size, per_warp = warp * vectors_in_flight;
    const int64_t warps = context.threads / warp, most = std::min(max_split, warps);
    int64_t split = 1;
    while (2 * split <= most && split * per_warp < vectors) split *= 2;
    const int64_t share = (vectors + split - 1) / split * vector_size<T>;
    launch(Grid(blocks_for(K, warps / split), context.threads, context.stream),
           matmul_forward_vectorized_kernel<T>, out.data, x.data, weight.data, residual.data, bias.data, C, K,
           share, split);
}

bool vectorized_supports(const Call& call) {
    const DType type = call.operand("x").dtype;
    return call["N"] == 1 && is_whole({call.operand("x").data, call.operand("weight").data}, call["C"],
                                      static_cast<int>(16 / size_of(type)));
}

}  // namespace

Variant vectorized_matmul_forward() {
    return {"vectorized", "one to four warps per row of the weight, 128-bit accesses",
            instantiations<LLAMAC_FLOATS(matmul_forward_vectorized)>(),
            Constraints{"N = 1, rows of whole 16-byte vectors, x and weight aligned to 16 bytes",
                        vectorized_supports},
            blocks_of(128, 256, max_block_threads)};
}

}  // namespace llamac
