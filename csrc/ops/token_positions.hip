// The position of each token in its sequence: rows of a table of learned positions.
//
//   out[b,t] = t + offset + end - begin[b] - first[b,t]
//
// first: where the token's document begins; end and begin: where a sequence's next token and its first one lie in a cache. What is
// null counts as 0.
//
// reference:  plain loops.
// naive:      one thread per token.
// vectorized: four tokens per thread, in 128-bit accesses.
#include "core/device.h"
#include "core/operation.h"

namespace llamac {
namespace {

void token_positions_reference(View<int32_t, 2> out, View<const int32_t, 2> first,
                               View<const int32_t, 1> begin, View<const int32_t, 1> end, int64_t offset) {
    for (int64_t b = 0; b < out.shape[0]; b++)
        for (int64_t t = 0; t < out.shape[1]; t++)
            out(b, t) = static_cast<int32_t>(t + offset + (end ? end(0) : 0) - (begin ? begin(b) : 0) -
                                             (first ? first(b, t) : 0));
}

__device__ int position(int64_t i, int64_t T, const int32_t* begin, const int32_t* end, int offset) {
    return static_cast<int>(i % T) + offset + (end ? *end : 0) - (begin ? begin[i / T] : 0);
}

// ---- naive

__global__ void token_positions_naive_kernel(int32_t* out, const int32_t* first, const int32_t* begin,
                                             const int32_t* end, int64_t N, int64_t T, int offset) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < N) out[i] = position(i, T, begin, end, offset) - (first ? first[i] : 0);
}

void token_positions_naive(View<int32_t, 2> out, View<const int32_t, 2> first, View<const int32_t, 1> begin,
                           View<const int32_t, 1> end, int64_t offset, LaunchContext context) {
    const int64_t T = out.shape[1], N = out.shape[0] * T;
    launch(context.grid(N), token_positions_naive_kernel, out.data, first.data, begin.data, end.data, N, T,
           static_cast<int>(offset));
}

// ---- vectorized: four tokens per thread, of one row

__global__ void token_positions_vectorized_kernel(Dependent<int32_t*> out_, Dependent<const int32_t*> first_,
                                                  Dependent<const int32_t*> begin_,
                                                  Dependent<const int32_t*> end_, int64_t N, int64_t T,
                                                  int offset) {
    const auto [out, first, begin, end] = start_next_and_wait(out_, first_, begin_, end_);
    const int64_t i = 4 * (int64_t{blockIdx.x} * blockDim.x + threadIdx.x);
    if (i >= N) return;
    const int at = position(i, T, begin, end, offset);
    const uint4 of = first ? load128(first + i) : make_uint4(0, 0, 0, 0);
    store128(out + i, make_uint4(at - of.x, at + 1 - of.y, at + 2 - of.z, at + 3 - of.w));
}

constexpr Constraints fours{"T a multiple of 4, tensors aligned to 16", [](const Call& c) {
                                return is_whole({c.operand("out").data, c.operand("first").data}, c["T"], 4);
                            }};

void token_positions_vectorized(View<int32_t, 2> out, View<const int32_t, 2> first,
                                View<const int32_t, 1> begin, View<const int32_t, 1> end, int64_t offset,
                                LaunchContext context) {
    const int64_t T = out.shape[1], N = out.shape[0] * T;
    launch(context.grid(N / 4), token_positions_vectorized_kernel, out.data, first.data, begin.data, end.data,
           N, T, static_cast<int>(offset));
}

Operation token_positions(
    "token_positions(out: i32[B,T]; first?: i32[B,T] >0, begin?: i32[B] >0, end?: i32[1] >0;"
    " offset: int {0, 3}) empty(B, T) test(B=2, T=1) test(B=2, T=64)",
    "out = the position of each token in its sequence",
    {{"vectorized", "four tokens per thread, 128-bit accesses", instantiations<token_positions_vectorized>(),
      fours, blocks_of(256, 128)},
     {"naive", "one thread per token", instantiations<token_positions_naive>()},
     {"reference", "plain loops", instantiations<token_positions_reference>()}});

}  // namespace
}  // namespace llamac
