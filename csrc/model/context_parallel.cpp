#include "model/context_parallel.h"

#include "core/observer.h"
#include "ops/operations.h"

namespace llamac {
namespace {

char* bytes_at(const Tensor& t, int64_t element) {
    return static_cast<char*>(t.data) + element * size_of(t.dtype);
}

// Keys and values of a token, and bytes of them.
int64_t kv_width(const Model& m) {
    return 2 * m.config.NKV * m.config.HD;
}
int64_t kv_bytes(const Model& m) {
    return kv_width(m) * size_of(m.keys.dtype);
}

int64_t batch_rows(const Model& m) {
    return m.activations.tokens.shape[0];
}

// S positions of B sequences, of which each has memory for `length`.
KeysAndValues keys_in(const Model& m, const Tensor& memory, int64_t S, int64_t length) {
    const int64_t width = kv_width(m);
    Tensor k = make_tensor(memory.data, memory.dtype, {batch_rows(m), S, m.config.NKV, m.config.HD});
    k.stride[0] = length * width;
    k.stride[1] = width;
    Tensor v = k;
    v.data = bytes_at(k, width / 2);
    return {k, v};
}

// Positions up to the end of a piece.
int64_t seen_positions(const Model& m, int64_t half) {
    const Pieces pieces = pieces_of(m);
    return pieces.start(half) + pieces.size();
}

// The ranks' tokens one after another, [ranks,B,T/ranks,width]; those of one rank.
Tensor all_parts(const Model& m) {
    const Pieces pieces = pieces_of(m);
    return make_tensor(m.key_parts.data, m.key_parts.dtype,
                       {pieces.axis.ranks, batch_rows(m) * 2 * pieces.size(), kv_width(m)});
}
Tensor part_of(const Model& m, int64_t rank) {
    const Tensor all = all_parts(m);
    return make_tensor(bytes_at(all, rank * all.stride[0]), all.dtype, {all.shape[1], all.shape[2]});
}

// Between a rank's own keys or values and their place in its part.
enum class Direction : uint8_t { to_part, from_part };
void copy_own_heads(const Model& m, const Tensor& heads, int64_t first, Direction direction) {
    const Tensor part = part_of(m, m.options.context.rank);
    void *const own = heads.data, *const packed = bytes_at(part, first);
    const int64_t own_pitch = heads.stride[1] * size_of(heads.dtype), packed_pitch = kv_bytes(m),
                  width = packed_pitch / 2, rows = heads.shape[0] * heads.shape[1];
    if (direction == Direction::to_part)
        copy_rows_async(m.context, packed, packed_pitch, own, own_pitch, width, rows);
    else
        copy_rows_async(m.context, own, own_pitch, packed, packed_pitch, width, rows);
}

// Copies each piece of the sequences between the ranks' parts and whole sequences.
void copy_pieces(const Model& m, const Tensor& sequences, Direction direction) {
    const Pieces pieces = pieces_of(m);
    const int64_t piece = pieces.size() * kv_bytes(m);
    for (int64_t rank = 0; rank < pieces.axis.ranks; rank++)
        for (const int64_t half : {0, 1}) {
            char *const part = static_cast<char*>(part_of(m, rank).data) + half * piece,
                        *const whole =
                            static_cast<char*>(sequences.data) + pieces.start(rank, half) * kv_bytes(m);
            const int64_t part_pitch = 2 * piece, whole_pitch = pieces.T * kv_bytes(m);
            if (direction == Direction::from_part)
                copy_rows_async(m.context, whole, whole_pitch, part, part_pitch, piece, batch_rows(m));
            else
                copy_rows_async(m.context, part, part_pitch, whole, whole_pitch, piece, batch_rows(m));
        }
}

// by_half: first halves of all sequences, then second ones; else sequence by sequence.
void copy_own_ids(const Model& m, const Tensor& own, const int32_t* ids, bool by_half) {
    if (!has_pieces(m)) return copy_bytes_async(m.context, own.data, ids, own.bytes());
    const Pieces pieces = pieces_of(m);
    const int64_t B = batch_rows(m), piece = pieces.size(), bytes = size_of(own.dtype);
    for (const int64_t half : {0, 1})
        copy_rows_async(m.context, bytes_at(own, half * piece * (by_half ? B : 1)),
                        piece * bytes * (by_half ? 1 : 2), ids + pieces.start(half), pieces.T * bytes,
                        piece * bytes, B);
}

}  // namespace

void check_context_parallel(const Config& config, const ModelOptions& o) {
    const int64_t ranks = o.context.ranks;
    if (ranks == 1) return;
    if (config.is_bert())
        fail("--cp ", ranks,
             ": expected a model of type llama, mistral, qwen2, qwen3, phi3, olmo2 or gpt2, found bert");
    if (divisible_length(o.context, o.seq_len) != o.seq_len)
        fail("--cp ", ranks, ": expected --seq-len to be a multiple of 2 * cp = ", 2 * ranks, ", found ",
             o.seq_len);
}

void plan_context_parallel(Model& m) {
    if (!has_pieces(m)) return;
    constexpr const char* group = "keys and values of all ranks";
    const DType dtype = m.options.precision.weights;
    const Tensor sequences = shaped(dtype, {m.options.batch_size, m.options.seq_len, kv_width(m)});
    m.arena.plan(group, &m.keys, sequences);
    m.arena.plan(group, &m.key_parts, sequences);
    if (m.options.training) m.arena.plan(group, &m.dkeys, sequences);
}

bool has_pieces(const Model& m) {
    return m.options.context.ranks > 1;
}

Pieces pieces_of(const Model& m) {
    return {m.options.context, m.activations.tokens.shape[1] * m.options.context.ranks};
}

void copy_own_tokens(const Model& m, const Tensor& own, const int32_t* ids) {
    copy_own_ids(m, own, ids, false);
}

void copy_own_halves(const Model& m, const Tensor& own, const int32_t* ids) {
    copy_own_ids(m, own, ids, true);
}

// The table of whole sequences has room where their keys will be.
void make_cis_of_pieces(Model& m) {
    Activations& a = m.activations;
    const Pieces pieces = pieces_of(m);
    if (a.cis_len == pieces.T) return;
    const Tensor whole = make_tensor(m.keys.data, DType::f32, {pieces.T, m.config.rotary_size() / 2, 2});
    CHECK(whole.bytes() <= m.keys.bytes());
    precompute_cis(
        m.context,
        {.cis = whole, .frequency = m.frequency, .attention_factor = m.config.rope_scaling.attention_factor});
    if (m.context.dry_run) return;
    const int64_t row = m.config.rotary_size(), piece = pieces.size() * row;
    for (const int64_t half : {0, 1})
        copy_bytes_async(m.context, bytes_at(a.cis, half * piece), bytes_at(whole, pieces.start(half) * row),
                         piece * size_of(DType::f32));
    a.cis_len = pieces.T;
}

void find_positions_of_pieces(const Model& m) {
    const Activations& a = m.activations;
    const Pieces pieces = pieces_of(m);
    const int64_t B = batch_rows(m), size = pieces.size();
    for (const int64_t half : {0, 1})
        for (int64_t b = 0; b < B; b++) {
            const auto rows = [&](const Tensor& of, int64_t first) {
                return of.data ? make_tensor(bytes_at(of, first * size), of.dtype, {1, size}) : Tensor{};
            };
            token_positions(m.context, {.out = rows(a.positions, 2 * b + half),
                                        .first = rows(a.mask, half * B + b),
                                        .offset = pieces.start(half)});
        }
}

Tensor half_of_heads(const Tensor& heads, int64_t half) {
    Tensor t = heads;
    t.shape[1] /= 2;
    t.data = bytes_at(heads, half * t.shape[1] * heads.stride[1]);
    return t;
}

Tensor half_of_memory(const Tensor& x, int64_t half) {
    if (!x.data) return {};
    CHECK(x.contiguous());
    void* const data = bytes_at(x, half * (x.elements() / 2));
    if (x.rank == 2) return make_tensor(data, x.dtype, {x.shape[0], x.shape[1] / 2});
    return make_tensor(data, x.dtype, {x.shape[0], x.shape[1], x.shape[2] / 2});
}

void gather_keys(Model& m, const Tensor& k, const Tensor& v) {
    plan_exchange(m.context, ExchangeAxis::context, m.options.context.ranks, all_parts(m).bytes());
    if (m.context.dry_run) return;
    copy_own_heads(m, k, 0, Direction::to_part);
    copy_own_heads(m, v, kv_width(m) / 2, Direction::to_part);
    all_gather(m.context, *m.context_ranks, all_parts(m), part_of(m, m.options.context.rank));
    copy_pieces(m, m.keys, Direction::from_part);
}

KeysAndValues keys_of_half(const Model& m, int64_t half) {
    return keys_in(m, m.keys, seen_positions(m, half), pieces_of(m).T);
}

// Those of half 1 are in whole sequences, which it may see all of. Those of half 0, at most half as many, are where parts are
// exchanged later.
KeysAndValues key_gradients_of_half(const Model& m, int64_t half) {
    const int64_t S = seen_positions(m, half);
    return half ? keys_in(m, m.dkeys, S, pieces_of(m).T) : keys_in(m, m.key_parts, S, S);
}

void sum_key_gradients(Model& m, const Tensor& dk, const Tensor& dv) {
    const int64_t T = pieces_of(m).T, width = kv_width(m), few = seen_positions(m, 0),
                  many = seen_positions(m, 1);
    for (int64_t b = 0; b < batch_rows(m); b++) {
        const auto rows = [&](const Tensor& of, int64_t first, int64_t count) {
            return make_tensor(bytes_at(of, first * width), of.dtype, {count, width});
        };
        scale_rows(m.context, {.out = rows(m.dkeys, b * T, few),
                               .x = rows(m.key_parts, b * few, few),
                               .scale = 1.0,
                               .accumulate = true});
        const Tensor unseen = rows(m.dkeys, b * T + many, T - many);
        if (!m.context.dry_run && many < T)
            CHECK(hipMemsetAsync(unseen.data, 0, static_cast<size_t>(unseen.bytes()), m.context.stream));
    }
    plan_exchange(m.context, ExchangeAxis::context, m.options.context.ranks, all_parts(m).bytes());
    if (m.context.dry_run) return;
    copy_pieces(m, m.dkeys, Direction::to_part);
    reduce_scatter(m.context, *m.context_ranks, part_of(m, m.options.context.rank), all_parts(m));
    copy_own_heads(m, dk, 0, Direction::from_part);
    copy_own_heads(m, dv, width / 2, Direction::from_part);
}

}  // namespace llamac
