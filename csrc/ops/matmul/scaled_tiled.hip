// The variant `tiled` of scaled_matmul and scaled_matmul_rows; tiled.h explains how a GEMM is tiled. Both operands lie along k,
// and the scales multiply the sums before anything is added.
#include "ops/matmul/matmul.h"
#include "ops/matmul/tiled.h"

namespace llamac {
namespace {

using namespace tiled;

struct TensorScale {
    float a, b;
    template <int>
    struct Columns {
        float a, b;
        __device__ float operator()(float sum, float, int) const { return scaled(sum, a, b); }
    };
    template <int size>
    __device__ Columns<size> columns(int) const {
        return {a, b};
    }
    __device__ float row(int) const { return 0; }
};
// For M rows and N columns; a block's tile may end beyond them.
struct RowScales {
    const float *a, *b;
    int M, N;
    template <int size>
    struct Columns {
        float b[size];
        __device__ float operator()(float sum, float a, int i) const { return scaled(sum, a, b[i]); }
    };
    template <int size>
    __device__ Columns<size> columns(int n) const {
        Columns<size> out;
#pragma unroll
        for (int i = 0; i < size; i++) out.b[i] = b[n + i < N ? n + i : N - 1];
        return out;
    }
    __device__ float row(int m) const { return a[m < M ? m : M - 1]; }
};

// Chips that do not multiply this form have the kernels' names without their code.
template <class O, class P, class Q>
__global__ void __launch_bounds__(S::threads)
    scaled_matmul_tiled_kernel(O* out, const O* initial, const P* a, const Q* b, const float* a_scale,
                               const float* b_scale, int M, int N, int K) {
    if constexpr (multiplies_fp8<P> && multiplies_fp8<Q>)
        multiply_block<Product<Layout::along_k, Layout::along_k, P, Q>>(
            out, initial, a, b, M, N, K, [=] { return TensorScale{*a_scale, *b_scale}; });
}
template <class O, class P, class Q>
__global__ void __launch_bounds__(S::threads)
    scaled_matmul_tiled_kernel_rows(O* out, const O* initial, const P* a, const Q* b, const float* a_scale,
                                    const float* b_scale, int M, int N, int K) {
    if constexpr (multiplies_fp8<P> && multiplies_fp8<Q>)
        multiply_block<Product<Layout::along_k, Layout::along_k, P, Q>>(
            out, initial, a, b, M, N, K, [=] { return RowScales{a_scale, b_scale, M, N}; });
}

template <class T, class P, class Q>
void scaled_matmul_tiled(View<T, 2> out, View<const P, 2> a, View<const Q, 2> b, View<const float, 1> a_scale,
                         View<const float, 1> b_scale, View<const T, 2> residual, bool accumulate, int64_t,
                         LaunchContext context) {
    const auto kernel = b_scale.shape[0] == 1 ? scaled_matmul_tiled_kernel<T, P, Q>
                                              : scaled_matmul_tiled_kernel_rows<T, P, Q>;
    on_machine([&](auto machine) {
        launch(grid_of<Sizes<decltype(machine)>>(out.shape[0], out.shape[1], context.stream), kernel,
               out.data, accumulate ? out.data : residual.data, a.data, b.data, a_scale.data, b_scale.data,
               out.shape[0], out.shape[1], a.shape[1]);
    });
}

bool scaled_tiled_supports(const Call& call) {
    const DeviceProperties& device = device_properties();
    const DType form = call.operand("a").dtype;
    bool fits = multiplies(device.fp8, form == DType::e4m3fnuz || form == DType::e5m2fnuz);
    on_machine([&](auto machine) { fits &= Sizes<decltype(machine)>::shared_bytes <= device.shared_bytes; });
    for (const char* operand : {"out", "a", "b", "residual"})
        fits &= reinterpret_cast<uintptr_t>(call.operand(operand).data) % 16 == 0;
    fits &= call["N"] <= 1 << 30 && call["K"] <= 1 << 30 && call["C"] <= 1 << 23;
    fits &= !(call.operand("residual").data && call.number("accumulate") != 0);
    return fits && call["C"] % 16 == 0 && call["K"] % 16 == 0;
}

}  // namespace

Variant tiled_scaled_matmul() {
    return {
        "tiled", "blocks on matrix cores, copies ahead of use, 128-bit accesses",
        instantiations<LLAMAC_PAIRS(scaled_matmul_tiled, float), LLAMAC_PAIRS(scaled_matmul_tiled, bf16)>(),
        Constraints{
            "fp8 of the form that the device multiplies, C and K multiples of 16, C at most 2^23, N and "
            "K at most 2^30, operands aligned to 16 bytes, residual or accumulate alone",
            scaled_tiled_supports}};
}

}  // namespace llamac
