#include "model/cache.h"

#include <algorithm>

#include "core/context.h"
#include "model/model.h"

namespace llamac {
namespace {

Tensor positions_of(const Tensor& cis, int64_t first, int64_t count) {
    Tensor part = cis;
    part.data = cis.as<float>() + first * cis.stride[0];
    part.shape[0] = count;
    return part;
}

// `count` tokens of one sequence, from its token `first` on.
void read_part(Model& m, int64_t sequence, const int32_t* tokens, int64_t first, int64_t count) {
    KvCache& c = *m.cache;
    const int64_t begin = c.begins[static_cast<size_t>(sequence)], position = begin + first;
    set_batch(m, tokens, tokens, 1, count);
    forward_cached(m,
                   {&c, sequence, begin, position, position + count, positions_of(c.cis, first, count), {}});
}

// One token of each sequence.
void read_next(Model& m, const int32_t* tokens) {
    KvCache& c = *m.cache;
    const auto B = static_cast<int64_t>(c.begins.size());
    const int64_t begin = B == 1 ? c.begins[0] : 0;
    Tensor cis = positions_of(c.cis, c.end - begin, 1), first;
    if (B > 1) {
        cis = positions_of(c.next_cis, 0, B);
        for (int64_t b = 0; b < B; b++) {
            const Tensor own = positions_of(c.cis, c.end - c.begins[static_cast<size_t>(b)], 1);
            copy_bytes_async(m.context, positions_of(cis, b, 1).data, own.data, own.bytes());
        }
        first = make_tensor(c.first.data, c.first.dtype, {B, 1});
    }
    set_batch(m, tokens, tokens, B, 1);
    forward_cached(m, {&c, 0, begin, c.end, c.end + 1, cis, first});
}

}  // namespace

void plan_cache(KvCache& cache, const Config& c, CacheSize size, DType dtype, Arena& arena) {
    constexpr const char* group = "keys and values";
    cache.size = size;
    cache.blocks.resize(static_cast<size_t>(c.L));
    for (Tensor& block : cache.blocks)
        arena.plan(group, &block, shaped(dtype, {size.sequences, size.positions, 2 * c.NKV, c.HD}));
    arena.plan(group, &cache.cis, shaped(DType::f32, {size.positions, c.HD / 2, 2}));
    arena.plan(group, &cache.next_cis, shaped(DType::f32, {size.sequences, c.HD / 2, 2}));
    arena.plan(group, &cache.first, shaped(DType::i32, {size.sequences, 1}));
    cache.begins.reserve(static_cast<size_t>(size.sequences));
}

void try_cache(Model& m) {
    KvCache& c = *m.cache;
    const int64_t T = std::min(m.options.seq_len, c.size.positions);
    c.begins.assign(1, 0);
    reshape_activations(m.activations, m.config, 1, T);
    forward_cached(m, {&c, 0, 0, c.size.positions - T, c.size.positions, positions_of(c.cis, 0, T), {}});
    const int64_t B = c.size.sequences, last = c.size.positions - 1;
    reshape_activations(m.activations, m.config, B, 1);
    const Tensor first = B > 1 ? c.first : Tensor{};
    forward_cached(m, {&c, 0, 0, last, last + 1, positions_of(c.next_cis, 0, B), first});
    std::vector<float> none;
    logits_of_rows(m, 0, B, none);
    reshape_activations(m.activations, m.config, m.options.batch_size, m.options.seq_len);
}

void begin_sequences(Model& m, std::span<const int64_t> lengths) {
    KvCache& c = *m.cache;
    const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
    CHECK(static_cast<int64_t>(lengths.size()) <= c.size.sequences && longest <= c.size.positions);
    c.begins.clear();
    for (const int64_t length : lengths) c.begins.push_back(static_cast<int32_t>(longest - length));
    c.end = longest;
    copy_bytes_async(m.context, c.first.data, c.begins.data(), static_cast<int64_t>(4 * lengths.size()));
}

void read_prompt(Model& m, int64_t sequence, std::span<const int32_t> tokens, std::vector<float>& logits) {
    const auto length = static_cast<int64_t>(tokens.size());
    CHECK(length > 0 && length == m.cache->end - m.cache->begins[static_cast<size_t>(sequence)]);
    int64_t count = 0;
    for (int64_t first = 0; first < length; first += count) {
        count = std::min(m.options.seq_len, length - first);
        read_part(m, sequence, tokens.data() + first, first, count);
    }
    logits_of_rows(m, count - 1, 1, logits);
}

void read_tokens(Model& m, std::span<const int32_t> tokens, std::vector<float>& logits) {
    KvCache& c = *m.cache;
    CHECK(tokens.size() == c.begins.size() && c.end < c.size.positions);
    read_next(m, tokens.data());
    c.end++;
    logits_of_rows(m, 0, static_cast<int64_t>(tokens.size()), logits);
}

}  // namespace llamac
