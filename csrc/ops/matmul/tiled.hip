// matmul's variant `tiled`; tiled.h explains how a GEMM is tiled.
#include "ops/matmul/tiled.h"

#include "ops/matmul/matmul.h"

namespace llamac {
namespace {

using namespace tiled;

// The sums plus a bias of each of N columns, or of none; a block's tile may end beyond them.
template <class E>
struct Biased {
    const E* bias;
    int N;
    template <int size>
    struct Columns {
        float bias[size];
        __device__ float operator()(float sum, float, int i) const { return sum + bias[i]; }
    };
    template <int size>
    __device__ Columns<size> columns(int n) const {
        static_assert(size == vector_size<E>);
        Columns<size> out;
        for (float& b : out.bias) b = -0.0f;  // the number that leaves every sum as it is
        if (bias && n < N) unpack<E>(load128(bias + n), out.bias);
        return out;
    }
    __device__ float row(int) const { return 0; }
};

template <class P, class E, class O, class Change>
__global__ void __launch_bounds__(S::threads)
    matmul_tiled_kernel(O* out, const O* initial, const E* a, const E* b, int M, int N, int K,
                        Change change) {
    multiply_block<P>(out, initial, a, b, M, N, K, [change] { return change; });
}

template <Layout a_layout, Layout b_layout, class E, class O, class Change = NoScale>
void matmul_tiled(O* out, const O* initial, const E* a, const E* b, int64_t M, int64_t N, int64_t K,
                  const LaunchContext& context, Change change = {}) {
    on_machine([&](auto machine) {
        using Z = Sizes<decltype(machine)>;
        launch(grid_of<Z>(M, N, context.stream),
               matmul_tiled_kernel<Product<a_layout, b_layout, E, E>, E, O, Change>, out, initial, a, b, M, N,
               K, change);
    });
}

template <class E>
void matmul_forward_tiled(View<E, 2> out, View<const E, 2> x, View<const E, 2> weight,
                          View<const E, 2> residual, View<const E, 1> bias, LaunchContext context) {
    matmul_tiled<Layout::along_k, Layout::along_k, E, E>(
        out.data, residual.data, x.data, weight.data, x.shape[0], weight.shape[0], x.shape[1], context,
        Biased<E>{bias.data, static_cast<int>(out.shape[1])});
}

template <class E>
void matmul_backward_input_tiled(View<E, 2> dx, View<const E, 2> dout, View<const E, 2> weight,
                                 bool accumulate, LaunchContext context) {
    matmul_tiled<Layout::along_k, Layout::down_k, E, E>(dx.data, accumulate ? dx.data : nullptr, dout.data,
                                                        weight.data, dx.shape[0], dx.shape[1], dout.shape[1],
                                                        context);
}

template <class E, class G>
void matmul_backward_weight_tiled(View<G, 2> dweight, View<const E, 2> dout, View<const E, 2> x,
                                  bool accumulate, LaunchContext context) {
    matmul_tiled<Layout::down_k, Layout::down_k, E, G>(dweight.data, accumulate ? dweight.data : nullptr,
                                                       dout.data, x.data, dweight.shape[0], dweight.shape[1],
                                                       x.shape[0], context);
}

bool tiled_supports(const Call& call) {
    bool whole = call["C"] % 8 == 0 && call["K"] % 8 == 0;
    for (size_t i = 0; i < call.op->operands.size(); i++)
        whole &= reinterpret_cast<uintptr_t>(call.tensor[i].data) % 16 == 0;
    return whole && call["N"] <= 1 << 30 && call["C"] <= 1 << 23 && call["K"] <= 1 << 23;
}

}  // namespace

MatmulVariants tiled_matmul() {
    return matmul_variants(
        {"tiled",
         "blocks on matrix cores, copies ahead of use, 128-bit accesses",
         {},
         Constraints{"C and K multiples of 8 and at most 2^23, N at most 2^30, operands aligned to 16 bytes",
                     tiled_supports}},
        instantiations<matmul_forward_tiled<bf16>, matmul_forward_tiled<fp16>>(),
        instantiations<matmul_backward_input_tiled<bf16>, matmul_backward_input_tiled<fp16>>(),
        instantiations<matmul_backward_weight_tiled<bf16, float>, matmul_backward_weight_tiled<fp16, float>,
                       matmul_backward_weight_tiled<bf16, bf16>>());
}

}  // namespace llamac
