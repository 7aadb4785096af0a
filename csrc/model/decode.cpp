#include "model/decode.h"

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
void prefill_part(Model& m, int64_t sequence, const int32_t* tokens, int64_t first, int64_t count) {
    KvCache& c = *m.cache;
    const int64_t begin = c.begins[sequence], position = begin + first;
    reshape_activations(m.activations, m.config, 1, count);
    copy_bytes_async(m.context, m.activations.tokens.data, tokens, m.activations.tokens.bytes());
    forward_cached(m, {.cache = &c,
                       .sequence = sequence,
                       .begin = begin,
                       .position = position,
                       .end = position + count,
                       .cis = positions_of(c.cis, first, count)});
}

KvCache::PendingPasses& pending_passes(KvCache& c) {
    if (!c.pending) c.pending = std::make_unique<KvCache::PendingPasses>(c.size.sequences);
    return *c.pending;
}

// Launches the pass of one token of each sequence, whose tokens are on the device.
void launch_decode(Model& m) {
    KvCache& c = *m.cache;
    const auto B = static_cast<int64_t>(c.begins.size());
    CHECK(c.end < c.size.positions);
    KvCache::PendingPasses& pending = pending_passes(c);
    int32_t* const end = pending.ends.data + pending.queued % pending.count;
    for (int64_t b = 0; c.own_cis.data && b < B; b++) {
        const Tensor to = positions_of(c.own_cis, b, 1);
        const Tensor from = positions_of(c.cis, c.end - c.begins[static_cast<size_t>(b)], 1);
        copy_bytes_async(m.context, to.data, from.data, to.bytes());
    }
    *end = static_cast<int32_t>(c.end++);
    copy_bytes_async(m.context, c.last.data, end, 4);
    const auto work = [&m] { forward_cached(m, {.cache = &*m.cache, .is_decode = true}); };
    // Observed passes are launched directly; a graph of the stream does not contain the ranks' gathers.
    if (!m.options.graphs || m.hook || m.context.observer || m.world || m.pipeline) return work();
    if (c.replay.sequences != B) {
        c.replay.graph.reset();
        work();  // allocates on its first call
        c.replay.sequences = B;
        return;
    }
    if (!c.replay.graph) c.replay.graph.emplace(m.context.stream, work);
    c.replay.graph->replay();
}

// The tokens of the next pass.
void set_tokens(Model& m, std::span<const int32_t> tokens) {
    const auto B = static_cast<int64_t>(m.cache->begins.size());
    const Tensor& own = m.activations.tokens;
    if (own.shape[0] != B || own.shape[1] != 1) reshape_activations(m.activations, m.config, B, 1);
    if (tokens.empty()) return;
    CHECK(static_cast<int64_t>(tokens.size()) == B);
    copy_bytes_async(m.context, own.data, tokens.data(), own.bytes());
}

}  // namespace

void plan_cache(KvCache& cache, const Config& c, const Parameters& p, CacheSize size, DType dtype,
                Arena& arena) {
    constexpr const char* group = "keys and values";
    cache.size = size;
    cache.blocks.resize(static_cast<size_t>(c.L));
    for (int64_t layer = 0; layer < c.L; layer++)
        if (p.holds(layer))
            arena.plan(group, &cache.blocks[layer],
                       shaped(dtype, {size.sequences, size.positions, 2 * c.NKV, c.HD}));
    arena.plan(group, &cache.cis, shaped(DType::f32, {size.positions, c.rotary_size() / 2, 2}));
    if (c.rotary_size() < c.HD) {
        arena.plan(group, &cache.own_cis, shaped(DType::f32, {size.sequences, c.rotary_size() / 2, 2}));
        arena.plan(group, &cache.unturned, shaped(DType::f32, {size.positions, c.HD / 2, 2}));
    }
    arena.plan(group, &cache.first, shaped(DType::i32, {size.sequences}));
    arena.plan(group, &cache.last, shaped(DType::i32, {1}));
    cache.begins.reserve(static_cast<size_t>(size.sequences));
}

void set_unturned(const KvCache& cache) {
    std::vector<float> angles(static_cast<size_t>(cache.unturned.elements()));
    for (size_t i = 0; i < angles.size(); i += 2) angles[i] = 1;
    copy_bytes(cache.unturned.data, angles.data(), cache.unturned.bytes());
}

void try_cache(Model& m) {
    KvCache& c = *m.cache;
    const int64_t T = std::min(m.options.own_len(), c.size.positions);
    c.begins.assign(1, 0);
    reshape_activations(m.activations, m.config, 1, T);
    forward_cached(m, {.cache = &c,
                       .position = c.size.positions - T,
                       .end = c.size.positions,
                       .cis = positions_of(c.cis, 0, T)});
    reshape_activations(m.activations, m.config, c.size.sequences, 1);
    forward_cached(m, {.cache = &c, .is_decode = true});
    std::vector<float> none;
    logits_of_rows(m, 0, c.size.sequences, none);
    argmax_of_rows(m, m.activations.tokens);
    reshape_activations(m.activations, m.config, m.options.batch_size, m.options.own_len());
}

void begin_sequences(Model& m, std::span<const int64_t> lengths) {
    KvCache& c = *m.cache;
    const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
    CHECK(static_cast<int64_t>(lengths.size()) <= c.size.sequences && longest <= c.size.positions);
    // Frees the memory of pending passes.
    for (KvCache::PendingPasses* pending = c.pending.get(); pending && pending->finished < pending->queued;
         pending->finished++)
        pending->done[pending->finished % pending->count].wait();
    c.begins.clear();
    for (const int64_t length : lengths) c.begins.push_back(static_cast<int32_t>(longest - length));
    c.end = longest;
    copy_bytes_async(m.context, c.first.data, c.begins.data(), static_cast<int64_t>(4 * lengths.size()));
}

void prefill(Model& m, int64_t sequence, std::span<const int32_t> tokens, std::vector<float>& logits) {
    const auto length = static_cast<int64_t>(tokens.size());
    CHECK(length > 0 && length == m.cache->end - m.cache->begins[sequence]);
    int64_t count = 0;
    for (int64_t first = 0; first < length; first += count) {
        count = std::min(m.options.own_len(), length - first);
        prefill_part(m, sequence, tokens.data() + first, first, count);
    }
    logits_of_rows(m, count - 1, 1, logits);
}

void decode(Model& m, std::span<const int32_t> tokens, std::vector<float>& logits) {
    CHECK(!m.cache->pending || m.cache->pending->finished == m.cache->pending->queued);
    set_tokens(m, tokens);
    launch_decode(m);
    logits_of_rows(m, 0, static_cast<int64_t>(tokens.size()), logits);
}

void queue_argmax(Model& m, std::span<const int32_t> tokens) {
    KvCache::PendingPasses& pending = pending_passes(*m.cache);
    CHECK(pending.queued - pending.finished < pending.count);
    set_tokens(m, tokens);
    launch_decode(m);
    argmax_of_rows(m, m.activations.tokens);
    const int64_t index = pending.queued++ % pending.count;
    const Tensor& found = m.activations.tokens;
    copy_bytes_async(m.context, pending.tokens.data + index * m.cache->size.sequences, found.data,
                     found.bytes());
    pending.done[index].record(m.context.stream);
}

void finish_argmax(Model& m, std::span<int32_t> found) {
    KvCache::PendingPasses& pending = *m.cache->pending;
    CHECK(found.size() == m.cache->begins.size() && pending.finished < pending.queued);
    const int64_t index = pending.finished++ % pending.count;
    pending.done[index].wait();
    std::copy_n(pending.tokens.data + index * m.cache->size.sequences, found.size(), found.begin());
}

}  // namespace llamac
