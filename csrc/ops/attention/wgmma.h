// Shared by the kernels for Hopper: tiles of rows in LDS, the pipeline between the producer (a thread that copies) and the
// consumer warpgroups, a warpgroup's two kinds of product.
#pragma once
#include "ops/attention/flash.h"
#include "platform/warpgroup.h"

#if defined(LLAMAC_WARPGROUPS)
namespace llamac {

bool wgmma_supports(const Call& call);  // wgmma_forward.hip
constexpr Constraints wgmma_constraints{
    "HD a multiple of 8 from 64 to 128, T and S at most 2^30, scale above 0, heads that begin at multiples "
    "of 16 bytes",
    wgmma_supports};
constexpr const char* wgmma_chip = "NVIDIA sm_90";

// `rows` rows of a head as load_tile lays them: panels of 64 columns, 128 bytes a row.
template <class E, int HD, int rows>
struct Panels {
    static constexpr int panel = rows * 128;
    static constexpr int bytes = HD / 64 * panel;
    alignas(1024) char data[bytes];

    // 16 bytes: `chunk` of a row, where the hardware's swizzle puts it.
    __device__ char* at(int row, int chunk) {
        return data + chunk / 8 * panel + row * 128 + (chunk % 8 ^ row % 8) * 16;
    }
};

// [B,T,heads,HD] as TMA sees it.
template <class E>
TensorMap map_of(View<const E, 4> x, int rows) {
    return make_tensor_map(x.data, {x.shape[3], x.shape[1], x.shape[2], x.shape[0]},
                           {1, x.stride[1], x.stride[2], x.stride[0]}, rows);
}

// LDS from the launch, where the swizzle's pattern begins.
constexpr int panels_alignment = 1024;
// Added as an offset: of a pointer made from a number the compiler would not know that it points to LDS.
template <class S>
__device__ S& aligned_shared_memory() {
    char* memory = dynamic_shared_memory();
    return *reinterpret_cast<S*>(memory + (panels_alignment - shared_address(memory) % panels_alignment) %
                                              panels_alignment);
}
template <class S>
constexpr size_t aligned_shared_bytes = sizeof(S) + panels_alignment;

// Registers per thread of the producer warpgroup and of the consumers; together all registers.
template <int consumers>
struct Warpgroups {
    static_assert(consumers == 2 || consumers == 3);
    static constexpr int threads = (1 + consumers) * warpgroup_size;
    static constexpr int consumer_registers = consumers == 2 ? 240 : 160;
    static constexpr int producer_registers = consumers == 2 ? 24 : 32;
};

// The pipeline stage of step n, and its phase: 0 and 1 in turn.
template <int stages>
struct Stage {
    int index, phase;
    __device__ explicit Stage(int n) : index(n % stages), phase(n / stages % 2) {}
};
// `full` ends a phase when the tiles have arrived, `free` when all consumers have read them: `arrivals` is the number of
// their warps, which arrive after products, or of their threads, which arrive after loads of their own.
template <int stages, int consumers>
struct Pipeline {
    static constexpr int threads = consumers * warpgroup_size, warps = threads / warp_size;
    SharedBarrier full[stages], free[stages];

    __device__ void init(int arrivals) {
        for (int i = 0; i < stages; i++) {
            full[i].init(1);
            free[i].init(arrivals);
        }
    }
};

#if defined(LLAMAC_WARPGROUP_CODE)
// A consumer warpgroup's place among them, a thread's in its products: rows row and row + 8 of 64, of
// every eight columns two from `column` on.
struct Consumer {
    int index, thread, row, column;
    __device__ Consumer()
        : index(__shfl(static_cast<int>(threadIdx.x) / warpgroup_size, 0) - 1),
          thread(static_cast<int>(threadIdx.x) % warpgroup_size),
          row(thread / warp_size * 16 + lane_index() / 4),
          column(lane_index() % 4 * 2) {}
};

// The columns that are not hidden in a warpgroup's 64 rows of scores: [all_from, all_to) in all rows, [from, to) in each of a
// thread's two. Rows are queries, whose columns are the keys that they see, or keys, whose columns are the queries that
// see them.
struct SeenColumns {
    int all_from, all_to, from[2], to[2], column;

    __device__ void of_queries(const auto& sight, int query, const Consumer& consumer) {
        all_from = sight.begin(query + 63), all_to = sight.end(query), column = consumer.column;
        for (int slot = 0; slot < 2; slot++) {
            from[slot] = sight.begin(query + consumer.row + 8 * slot);
            to[slot] = sight.end(query + consumer.row + 8 * slot);
        }
    }
    __device__ void of_keys(const auto& sight, int key, const Consumer& consumer) {
        all_from = sight.first_query(key + 63), all_to = sight.queries_until(key), column = consumer.column;
        for (int slot = 0; slot < 2; slot++) {
            from[slot] = sight.first_query(key + consumer.row + 8 * slot);
            to[slot] = sight.queries_until(key + consumer.row + 8 * slot);
        }
    }
    // s: the columns from `first` on.
    template <int n>
    __device__ void hide(float (&s)[n], int first, float hidden) const {
        if (first >= all_from && first + 2 * n <= all_to) return;
#pragma unroll
        for (int i = 0; i < n; i++) {
            const int at = first + i / 4 * 8 + column + i % 2, slot = i / 2 % 2;
            if (at < from[slot] || at >= to[slot]) s[i] = hidden;
        }
    }
};

template <class E, int HD, int rows>
__device__ void load_rows(Panels<E, HD, rows>& to, const TensorMap& map, SharedBarrier& full, int row,
                          int64_t head, int64_t batch) {
    for (int p = 0; p < HD / 64; p++)
        load_tile(to.data + p * to.panel, map, full, 64 * p, row, static_cast<int>(head),
                  static_cast<int>(batch));
}

// c = a b': 64 rows of a from `first` on with all rows of b.
template <class E, int HD, int a_rows, int rows>
__device__ void begin_rows_product(float (&c)[rows / 2], const Panels<E, HD, a_rows>& a, int first,
                                   const Panels<E, HD, rows>& b) {
    const uint64_t left = shared_operand(a.data + first * 128), right = shared_operand(b.data);
#pragma unroll
    for (int d = 0; d < HD / 16; d++) {
        const uint64_t at_left = advance(left, d / 4 * a.panel + d % 4 * 32),
                       at_right = advance(right, d / 4 * b.panel + d % 4 * 32);
        if (d == 0)
            warpgroup_multiply<E, true, false>(c, at_left, at_right);
        else
            warpgroup_multiply<E, false, false>(c, at_left, at_right);
    }
    warpgroup_commit();
}
// c += p b, p as pack() gives it.
template <class E, int HD, int rows>
__device__ void begin_columns_product(float (&c)[HD / 2], const uint32_t (&p)[rows / 16][4],
                                      const Panels<E, HD, rows>& b) {
    const uint64_t right = shared_operand(b.data, b.panel);
#pragma unroll
    for (int d = 0; d < rows / 16; d++)
        warpgroup_multiply<E, false, true>(c, p[d], advance(right, d * 16 * 128));
    warpgroup_commit();
}
// c += p b, p in LDS: 64 rows of p from `first` on.
template <class E, int HD, int p_rows, int rows>
__device__ void begin_columns_product(float (&c)[HD / 2], const Panels<E, rows, p_rows>& p, int first,
                                      const Panels<E, HD, rows>& b) {
    static_assert(rows == 64, "one panel");
    const uint64_t left = shared_operand(p.data + first * 128), right = shared_operand(b.data, b.panel);
#pragma unroll
    for (int d = 0; d < rows / 16; d++)
        warpgroup_multiply<E, false, true>(c, advance(left, d * 32), advance(right, d * 16 * 128));
    warpgroup_commit();
}
// A product's sums as the operand of another, rounded.
template <class E, int n>
__device__ void pack(uint32_t (&p)[n / 8][4], const float (&s)[n]) {
#pragma unroll
    for (int i = 0; i < n; i += 2) p[i / 8][i / 2 % 4] = pair_bits<E>(s[i], s[i + 1]);
}

// A consumer's 64 rows of a product, each scaled, rounded, through its own rows of `through` to memory: those below
// `valid`, `to` being the first, and `width` of their columns.
template <class E, int HD, int rows>
__device__ void store_product(E* to, int64_t stride, const float (&c)[HD / 2], const float (&scale)[2],
                              Panels<E, HD, rows>& through, const Consumer& consumer, int valid, int width) {
    const int first = consumer.index * 64;
#pragma unroll
    for (int i = 0; i < HD / 2; i += 2) {
        const int slot = i / 2 % 2;
        *reinterpret_cast<uint32_t*>(through.at(first + consumer.row + 8 * slot, i / 4) +
                                     consumer.column * 2) =
            pair_bits<E>(c[i] * scale[slot], c[i + 1] * scale[slot]);
    }
    named_barrier_wait(3 + consumer.index, warpgroup_size);
    for (int i = consumer.thread; i < 64 * HD / 8; i += warpgroup_size) {
        const int row = i / (HD / 8), chunk = i % (HD / 8);
        if (row < valid && (width == HD || 8 * chunk < width))
            store128(to + row * stride + 8 * chunk,
                     *reinterpret_cast<const uint4*>(through.at(first + row, chunk)));
    }
}
#endif

}  // namespace llamac
#endif
