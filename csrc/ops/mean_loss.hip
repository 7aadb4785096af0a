// The mean of losses over the rows that count.
//
//   num_valid = the number of n with targets[n] != ignore_index
//   mean      = sum_n losses[n] / num_valid, over these n; NaN where there is none
//
// It serves callers that cannot take the mean on the host, such as a framework's graph. cross_entropy takes the mean of its own
// losses with these launchers; the operation is for losses of several calls.
//
// reference:  plain loops.
// cpu:        one thread: thousands of rows are too few for more.
// naive:      one thread.
// one_block:  one block, loads of four rows per thread in flight: a batch has some ten thousand rows of 8 bytes.
//
// Measured: docs/benchmarks/nvidia-h200.md.
#include "ops/mean_loss.h"

#include "core/device.h"
#include "core/simd.h"

namespace llamac {

template <class A>
void mean_loss_reference(View<A, 0> mean, View<A, 0> num_valid, View<const A, 1> losses,
                         View<const int32_t, 1> targets, int64_t ignore_index) {
    double sum = 0;
    int64_t rows = 0;
    for (int64_t n = 0; n < losses.shape[0]; n++) {
        if (targets(n) == ignore_index) continue;
        sum += double(losses(n));
        rows++;
    }
    if (mean) mean() = A(sum / double(rows));
    if (num_valid) num_valid() = A(rows);
}

void mean_loss_cpu(View<float, 0> mean, View<float, 0> num_valid, View<const float, 1> losses,
                   View<const int32_t, 1> targets, int64_t ignore_index) {
    const int64_t N = losses.shape[0];
    const auto counts = [=](int64_t n) { return targets(n) == ignore_index ? 0.0f : 1.0f; };
    const double rows = block_sum(N, counts);
    const double sum = block_sum(N, [=](int64_t n) { return counts(n) > 0 ? losses.data[n] : 0.0f; });
    if (mean) mean() = static_cast<float>(sum / rows);
    if (num_valid) num_valid() = static_cast<float>(rows);
}

namespace {

__global__ void mean_loss_naive_kernel(float* mean, float* num_valid, const float* losses,
                                       View<const int32_t, 1> targets, int64_t N, int64_t ignore_index) {
    if (blockIdx.x > 0 || threadIdx.x > 0) return;
    double sum = 0;
    int64_t rows = 0;
    for (int64_t n = 0; n < N; n++) {
        if (targets(n) == ignore_index) continue;
        sum += double(losses[n]);
        rows++;
    }
    if (mean) *mean = static_cast<float>(sum / double(rows));
    if (num_valid) *num_valid = static_cast<float>(rows);
}

__global__ void __launch_bounds__(max_threads_per_block)
    mean_loss_one_block_kernel(Dependent<float*> mean_, Dependent<float*> num_valid_,
                               Dependent<const float*> losses_, Dependent<View<const int32_t, 1>> targets_,
                               int64_t N, int64_t ignore_index) {
    const auto [mean, num_valid, losses, targets] = wait(mean_, num_valid_, losses_, targets_);
    constexpr int at_once = 4;
    struct Shared {
        float sums[max_warps], rows[max_warps];
    };
    Shared& shared = shared_memory<Shared>();
    float sum = 0, rows = 0;  // whole numbers below 2^24 are exact
    for (int64_t first = threadIdx.x; first < N; first += at_once * blockDim.x) {
        float value[at_once];
        int32_t target[at_once];
#pragma unroll
        for (int k = 0; k < at_once; k++) {
            const int64_t n = first + k * blockDim.x, within = n < N ? n : first;
            value[k] = losses[within];
            target[k] = targets(within);
        }
#pragma unroll
        for (int k = 0; k < at_once; k++) {
            if (first + k * blockDim.x >= N || target[k] == ignore_index) continue;
            sum += value[k];
            rows += 1;
        }
    }
    sum = block_sum(sum, shared.sums);
    rows = block_sum(rows, shared.rows);
    if (threadIdx.x != 0) return;
    if (mean) *mean = sum / rows;
    if (num_valid) *num_valid = rows;
}

}  // namespace

void mean_loss_naive(View<float, 0> mean, View<float, 0> num_valid, View<const float, 1> losses,
                     View<const int32_t, 1> targets, int64_t ignore_index, LaunchContext context) {
    launch(Grid(1, context.threads, context.stream), mean_loss_naive_kernel, mean.data, num_valid.data,
           losses.data, targets, losses.shape[0], ignore_index);
}

void mean_loss_one_block(View<float, 0> mean, View<float, 0> num_valid, View<const float, 1> losses,
                         View<const int32_t, 1> targets, int64_t ignore_index, LaunchContext context) {
    launch(Grid(1, context.threads, context.stream), mean_loss_one_block_kernel, mean.data, num_valid.data,
           losses.data, targets, losses.shape[0], ignore_index);
}

template decltype(mean_loss_reference<float>) mean_loss_reference<float>;
template decltype(mean_loss_reference<double>) mean_loss_reference<double>;

namespace {

Operation mean_loss(
    "mean_loss<A: f32 f64>"
    "(mean: A[] mean, num_valid?: A[]; losses: A[N] >0, targets: i32[N] strided except(ignore_index);"
    " ignore_index: int {-100, 0, 5}) rows(N) empty(N)",
    "mean = sum of losses / rows whose target is not ignore_index, and those rows' number",
    {{"cpu", "one thread", instantiations<mean_loss_cpu>()},
     {"one_block", "one block, the loads of four rows per thread in flight",
      instantiations<mean_loss_one_block>(), nullptr, blocks_of(1024, 256)},
     {"naive", "one thread", instantiations<mean_loss_naive>(), nullptr, blocks_of(64)},
     {"reference", "plain loops", instantiations<mean_loss_reference<float>, mean_loss_reference<double>>()}},
    [](const Call& c) { return 1.0 * c["N"]; });

}  // namespace
}  // namespace llamac
