// Attention backward on matrix cores, variant 2 of attention.hip (Dao 2023, FlashAttention-2), without atomics.
// The scores are made anew from q, k and lse, twice:
//
//   keys      a block owns rows of k and v and walks over the queries that see them, through all query heads
//             that share them: s' = k q', dp' = v dout', dv += p' dout, dk += ds' q
//   queries   a block owns rows of q and dout and walks over the keys that they see: s = q k', dp = dout v',
//             dq += ds k
//
// with c = scale * log2 e, p = 2^(c s - lse * log2 e), ds = p (dp - delta). Seven products instead of the five
// of one pass, but every sum is one warp's own, in the same order in every run, and p and ds go straight from
// accumulators to operands in both. The workspace is delta, f32[B,NH,T].
#include "ops/attention/attention.h"
#include "ops/attention/flash.h"

namespace llamac {
namespace {

using T = Tile<16>;

// A block's `rows` of two tensors, and `step` rows a step of the two that it walks over, in two buffers: one is
// filled while the other is used. mine: rows a warp.
template <int HD, int rows_, int step_, int mine_, class M>
struct Walk {
    static constexpr int R = 16, rows = rows_, step = step_, warp_rows = mine_;
    static constexpr int row_tiles = warp_rows / R, step_tiles = step / R, head_tiles = HD / R;
    static constexpr int threads = rows / warp_rows * M::warp;
    static constexpr int row_bytes = rows * HD * 2, step_bytes = step * HD * 2;
    // Where operands go to registers the rows come through the steps' place, one tensor after the other.
    static constexpr int steps_at = M::operands_in_registers ? 0 : 2 * row_bytes;
    static constexpr int tiles_end = steps_at + 4 * step_bytes;
    static_assert(tiles_end >= row_bytes);
};
// The keys' kernel holds two sums a warp: with heads of 128 that leaves room for 16 rows. WMMA has half the room.
template <int HD, class M>
constexpr int keys_of_warp = HD == 64 && !std::is_same_v<M, Wmma> ? 32 : 16;
template <int HD, class M>
constexpr int queries_of_warp = std::is_same_v<M, Wmma> ? 16 : 32;
template <class M>
constexpr int rows_of_block = std::is_same_v<M, Wmma> ? 64 : 128;

template <int HD, class M = Machine>
struct Keys : Walk<HD, rows_of_block<M>,
                   std::is_same_v<M, Wmma>                   ? 16
                   : HD == 128 && std::is_same_v<M, MmaSync> ? 64
                                                             : 32,
                   keys_of_warp<HD, M>, M> {};
template <int HD, class M = Machine>
struct Queries : Walk<HD, rows_of_block<M>, std::is_same_v<M, Wmma> ? 16 : 32, queries_of_warp<HD, M>, M> {};

// delta[b,h,t] = sum_d dout * out. A group of lanes a row, 128 bits a lane.
template <int HD>
__global__ void __launch_bounds__(256)
    attention_backward_kernel2_delta(float* delta, View<const bf16, 4> dout, View<const bf16, 4> out) {
    constexpr int lanes = HD / vector_size<bf16>;
    const int64_t time = out.shape[1], heads = out.shape[2];
    const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / lanes;  // of [B,T,NH]
    const int lane = static_cast<int>(threadIdx.x) % lanes * vector_size<bf16>;
    const bool inside = i < out.shape[0] * time * heads;
    const int64_t b = i / heads / time, t = i / heads % time, h = i % heads;
    float sum = 0;
    if (inside) {
        float x[vector_size<bf16>], y[vector_size<bf16>];
        unpack(load128(row_of(dout, b, t, h) + lane), x);
        unpack(load128(row_of(out, b, t, h) + lane), y);
        for (int e = 0; e < vector_size<bf16>; e++) sum += x[e] * y[e];
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor(sum, distance);
    if (inside && lane == 0) delta[(b * heads + h) * time + t] = sum;
}

// The rows that the block owns, of two tensors, taken by its warps.
template <class C, int HD>
__device__ void take_rows(WarpRows<T, HD, C::row_tiles>& first, const bf16* first_rows, int64_t first_stride,
                          WarpRows<T, HD, C::row_tiles>& second, const bf16* second_rows,
                          int64_t second_stride, int valid) {
    const int row = warp_index() * C::warp_rows;
    const SharedTile<HD> shared_first{dynamic_shared_memory()},
        shared_second{dynamic_shared_memory() + (Machine::operands_in_registers ? 0 : C::row_bytes)};
    TileCopy<C::rows, HD, C::threads> copy;
    copy.begin(shared_first, first_rows, first_stride, valid);
    copy.end();
    __syncthreads();
    first.take(shared_first, row);
    __syncthreads();
    copy.begin(shared_second, second_rows, second_stride, valid);
    copy.end();
    __syncthreads();
    second.take(shared_second, row);
    __syncthreads();
}

// A sum of a block's rows, scaled, rounded and stored. All warps are done with LDS, and are again after it.
template <class C, int HD>
__device__ void store_sum(bf16* to, int64_t stride, T::Accumulator (&sum)[C::row_tiles][C::head_tiles],
                          float scale, int valid) {
    const SharedTile<HD> shared{dynamic_shared_memory()};
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++) {
#pragma unroll
        for (int n = 0; n < C::head_tiles; n++)
#pragma unroll
            for (int i = 0; i < T::elements; i++) sum[r][n].x[i] *= scale;
        T::store_rows(shared, warp_index() * C::warp_rows + r * C::R, sum[r]);
    }
    __syncthreads();
    store_tile<C::rows, HD, C::threads>(to, stride, shared, valid);
    __syncthreads();
}

// lse and delta of a step's queries, in LDS beside the tiles.
template <class C>
struct Statistics {
    float lse[C::step], delta[C::step];
};

template <int HD>
__global__ void __launch_bounds__(Keys<HD>::threads) LLAMAC_WAVES_A_SIMD(2)
    attention_backward_kernel2_keys(View<bf16, 4> dk, View<bf16, 4> dv, View<const bf16, 4> dout,
                                    View<const float, 3> lse, const float* delta, View<const bf16, 4> q,
                                    View<const bf16, 4> k, View<const bf16, 4> v, float scale) {
    using C = Keys<HD>;
    const int time = static_cast<int>(q.shape[1]), group = static_cast<int>(q.shape[2] / k.shape[2]);
    const Piece piece = piece_of((time + C::rows - 1) / C::rows, k.shape[2]);
    const int first = static_cast<int>(piece.block) * C::rows;  // more queries come first
    const int row = first + warp_index() * C::warp_rows;
    char* const steps = dynamic_shared_memory() + C::steps_at;
    Statistics<C>* const statistics =
        reinterpret_cast<Statistics<C>*>(dynamic_shared_memory() + C::tiles_end);

    WarpRows<T, HD, C::row_tiles> rows_k, rows_v;
    take_rows<C>(rows_k, row_of(k, piece.batch, first, piece.head), k.stride[1], rows_v,
                 row_of(v, piece.batch, first, piece.head), v.stride[1], time - first);
    T::Accumulator sum_k[C::row_tiles][C::head_tiles] = {}, sum_v[C::row_tiles][C::head_tiles] = {};

    TileCopy<C::step, HD, C::threads> copy_q, copy_dout;
    const int start = first / C::step * C::step, steps_a_head = (time - start + C::step - 1) / C::step;
    float next_lse = 0, next_delta = 0;
    const auto begin_step = [&](int n) {
        const int64_t head = piece.head * group + n / steps_a_head;
        const int t0 = start + n % steps_a_head * C::step, mine = static_cast<int>(threadIdx.x);
        char* const buffer = steps + n % 2 * 2 * C::step_bytes;
        copy_q.begin(SharedTile<HD>{buffer}, row_of(q, piece.batch, t0, head), q.stride[1], time - t0);
        copy_dout.begin(SharedTile<HD>{buffer + C::step_bytes}, row_of(dout, piece.batch, t0, head),
                        dout.stride[1], time - t0);
        // Queries that do not exist get p = 2^-inf.
        const bool exists = mine < C::step && t0 + mine < time;
        const int64_t at = (piece.batch * q.shape[2] + head) * time + t0 + mine;
        next_lse = exists ? lse.data[at] * log2_e : INFINITY;
        next_delta = exists ? delta[at] : 0;
    };
    begin_step(0);
    for (int n = 0; n < group * steps_a_head; n++) {
        copy_q.end();
        copy_dout.end();
        Statistics<C>& of_step = statistics[n % 2];
        if (static_cast<int>(threadIdx.x) < C::step)
            of_step.lse[threadIdx.x] = next_lse, of_step.delta[threadIdx.x] = next_delta;
        __syncthreads();  // the step's tiles are there, nobody uses the others
        if (n + 1 < group * steps_a_head) begin_step(n + 1);

        const int t0 = start + n % steps_a_head * C::step;
        if (t0 + C::step <= row) continue;  // all before the warp's keys
        const SharedTile<HD> shared_q{steps + n % 2 * 2 * C::step_bytes},
            shared_dout{shared_q.data + C::step_bytes};
        T::Accumulator p[C::row_tiles][C::step_tiles] = {}, dp[C::row_tiles][C::step_tiles] = {};
        add_rows_product<T>(p, rows_k, shared_q);
        const bool masked = t0 < row + C::warp_rows - 1;
#pragma unroll
        for (int m = 0; m < C::step_tiles; m++)
#pragma unroll
            for (int i = 0; i < T::elements; i++) {
                const int column = m * C::R + T::column(i);
                const float shift = of_step.lse[column];
#pragma unroll
                for (int r = 0; r < C::row_tiles; r++) {
                    float& x = p[r][m].x[i];
                    x = fast_exp2(fmaf(x, scale * log2_e, -shift));
                    if (masked && t0 + column < row + r * C::R + T::row(T::slot(i))) x = 0;
                }
            }
        add_columns_product<T>(sum_v, Packed<T, C::row_tiles, C::step_tiles>(p), shared_dout);
        add_rows_product<T>(dp, rows_v, shared_dout);
#pragma unroll
        for (int m = 0; m < C::step_tiles; m++)
#pragma unroll
            for (int i = 0; i < T::elements; i++) {
                const float d = of_step.delta[m * C::R + T::column(i)];
#pragma unroll
                for (int r = 0; r < C::row_tiles; r++) dp[r][m].x[i] = p[r][m].x[i] * (dp[r][m].x[i] - d);
            }
        add_columns_product<T>(sum_k, Packed<T, C::row_tiles, C::step_tiles>(dp), shared_q);
    }
    __syncthreads();
    store_sum<C, HD>(row_of(dk, piece.batch, first, piece.head), dk.stride[1], sum_k, scale, time - first);
    store_sum<C, HD>(row_of(dv, piece.batch, first, piece.head), dv.stride[1], sum_v, 1, time - first);
}

template <int HD>
__global__ void __launch_bounds__(Queries<HD>::threads) LLAMAC_WAVES_A_SIMD(2)
    attention_backward_kernel2_queries(View<bf16, 4> dq, View<const bf16, 4> dout, View<const float, 3> lse,
                                       const float* delta, View<const bf16, 4> q, View<const bf16, 4> k,
                                       View<const bf16, 4> v, float scale) {
    using C = Queries<HD>;
    const int time = static_cast<int>(q.shape[1]), blocks = (time + C::rows - 1) / C::rows;
    const Piece piece = piece_of(blocks, q.shape[2]);
    const int first = (blocks - 1 - static_cast<int>(piece.block)) * C::rows;  // more keys come first
    const int row = first + warp_index() * C::warp_rows;
    const int64_t key_head = piece.head / (q.shape[2] / k.shape[2]);
    char* const steps = dynamic_shared_memory() + C::steps_at;

    WarpRows<T, HD, C::row_tiles> rows_q, rows_dout;
    take_rows<C>(rows_q, row_of(q, piece.batch, first, piece.head), q.stride[1], rows_dout,
                 row_of(dout, piece.batch, first, piece.head), dout.stride[1], time - first);
    float row_lse[C::row_tiles][T::slots], row_delta[C::row_tiles][T::slots];
#pragma unroll
    for (int r = 0; r < C::row_tiles; r++)
#pragma unroll
        for (int slot = 0; slot < T::slots; slot++) {
            const int t = row + r * C::R + T::row(slot);
            const int64_t at = (piece.batch * q.shape[2] + piece.head) * time + t;
            row_lse[r][slot] = t < time ? lse.data[at] * log2_e : INFINITY;
            row_delta[r][slot] = t < time ? delta[at] : 0;
        }
    T::Accumulator sum[C::row_tiles][C::head_tiles] = {};

    TileCopy<C::step, HD, C::threads> copy_k, copy_v;
    const int end = time < first + C::rows ? time : first + C::rows;
    const auto begin_step = [&](int s0) {
        char* const buffer = steps + s0 / C::step % 2 * 2 * C::step_bytes;
        copy_k.begin(SharedTile<HD>{buffer}, row_of(k, piece.batch, s0, key_head), k.stride[1], time - s0);
        copy_v.begin(SharedTile<HD>{buffer + C::step_bytes}, row_of(v, piece.batch, s0, key_head),
                     v.stride[1], time - s0);
    };
    begin_step(0);
    for (int s0 = 0; s0 < end; s0 += C::step) {
        copy_k.end();
        copy_v.end();
        __syncthreads();  // the step's tiles are there, nobody uses the others
        if (s0 + C::step < end) begin_step(s0 + C::step);
        if (s0 >= row + C::warp_rows) continue;  // all after the warp's queries

        const SharedTile<HD> shared_k{steps + s0 / C::step % 2 * 2 * C::step_bytes},
            shared_v{shared_k.data + C::step_bytes};
        T::Accumulator p[C::row_tiles][C::step_tiles] = {}, dp[C::row_tiles][C::step_tiles] = {};
        add_rows_product<T>(p, rows_q, shared_k);
        add_rows_product<T>(dp, rows_dout, shared_v);
        const bool masked = s0 + C::step - 1 > row;
#pragma unroll
        for (int r = 0; r < C::row_tiles; r++)
#pragma unroll
            for (int n = 0; n < C::step_tiles; n++)
#pragma unroll
                for (int i = 0; i < T::elements; i++) {
                    const int slot = T::slot(i);
                    float x = fast_exp2(fmaf(p[r][n].x[i], scale * log2_e, -row_lse[r][slot]));
                    if (masked && s0 + n * C::R + T::column(i) > row + r * C::R + T::row(slot)) x = 0;
                    dp[r][n].x[i] = x * (dp[r][n].x[i] - row_delta[r][slot]);
                }
        add_columns_product<T>(sum, Packed<T, C::row_tiles, C::step_tiles>(dp), shared_k);
    }
    __syncthreads();
    store_sum<C, HD>(row_of(dq, piece.batch, first, piece.head), dq.stride[1], sum, scale, time - first);
}

template <int HD>
void attention_backward_flash(View<bf16, 4> dq, View<bf16, 4> dk, View<bf16, 4> dv, View<const bf16, 4> dout,
                              View<const bf16, 4> out, View<const float, 3> lse, View<const bf16, 4> q,
                              View<const bf16, 4> k, View<const bf16, 4> v, float scale,
                              const Device& device) {
    float* const delta = static_cast<float*>(device.workspace);
    const int64_t B = q.shape[0], time = q.shape[1], NH = q.shape[2], NKV = k.shape[2];
    launch(Grid(blocks_for(B * time * NH * (HD / vector_size<bf16>), 256), 256, device.stream),
           attention_backward_kernel2_delta<HD>, delta, dout, out);
    on_machine([&](auto machine) {
        using OfKeys = Keys<HD, decltype(machine)>;
        using OfQueries = Queries<HD, decltype(machine)>;
        launch(Grid(blocks_for((time + OfKeys::rows - 1) / OfKeys::rows * NKV * B, 1), OfKeys::threads,
                    device.stream, OfKeys::tiles_end + 2 * sizeof(Statistics<OfKeys>)),
               attention_backward_kernel2_keys<HD>, dk, dv, dout, lse, delta, q, k, v, scale);
        launch(Grid(blocks_for((time + OfQueries::rows - 1) / OfQueries::rows * NH * B, 1),
                    OfQueries::threads, device.stream, OfQueries::tiles_end),
               attention_backward_kernel2_queries<HD>, dq, dout, lse, delta, q, k, v, scale);
    });
}

}  // namespace

void attention_backward_2(View<bf16, 4> dq, View<bf16, 4> dk, View<bf16, 4> dv, View<const bf16, 4> dout,
                          View<const bf16, 4> out, View<const float, 3> lse, View<const bf16, 4> q,
                          View<const bf16, 4> k, View<const bf16, 4> v, double scale, Device device) {
    (q.shape[3] == 64 ? attention_backward_flash<64>
                      : attention_backward_flash<128>)(dq, dk, dv, dout, out, lse, q, k, v,
                                                       static_cast<float>(scale), device);
}

int64_t attention_backward_workspace_2(const Call& call) {
    return call["B"] * call["NH"] * call["T"] * 4;
}

}  // namespace llamac
