#include "model/config.h"

#include <algorithm>
#include <cmath>

namespace llamac {

Config divide(const Config& c, const Axis& tensor) {
    const int64_t ranks = tensor.ranks, tokens = tokens_per_rank(c.V, ranks);
    if (ranks == 1) return c;
    if (c.is_bert() || c.output_norm)
        fail("--tp ", ranks, ": expected a model of type llama, mistral, qwen2, qwen3, phi3 or gpt2, found ",
             c.model_type);
    if (c.is_fused && c.NH != c.NKV)
        fail("--tp ", ranks, ": expected as many key and value heads as attention heads in a model of type ",
             c.model_type, ", found ", c.NKV, " and ", c.NH);
    Config part = c;
    const auto divide_size = [&](const char* field, int64_t& size) {
        if (size % ranks != 0)
            fail("--tp ", ranks, ": expected a divisor of the model's heads and feed-forward width, found ",
                 size, " ", field);
        size /= ranks;
    };
    divide_size("attention heads", part.NH);
    divide_size("key and value heads", part.NKV);
    divide_size("feed-forward channels", part.F);
    part.row_ranks = ranks;
    part.V = std::min(tokens, c.V - tensor.rank * tokens);
    if (tokens * (ranks - 1) >= c.V)
        fail("--tp ", ranks, ": expected at most one rank per token of the vocabulary, found ", c.V,
             " tokens");
    part.vocabulary_rows = (tokens + 64) / 64 * 64;  // the last is zeros: the row of the other ranks' tokens
    return part;
}

std::vector<double> rope_frequencies(const Config& c, int64_t T) {
    const RopeScaling& r = c.rope_scaling;
    const int64_t pairs = c.rotary_size() / 2;
    if (c.positions == PositionKind::learned) return std::vector<double>(static_cast<size_t>(pairs), 0.0);
    constexpr double pi = 3.14159265358979323846;
    const auto context = static_cast<double>(r.original_context), half = static_cast<double>(pairs);
    // YaRN's bounds are the pairs that make a number of turns within the original context.
    const auto pair_of = [&](double turns) {
        return 2 * half * std::log(context / (turns * 2 * pi)) / (2 * std::log(c.rope_theta));
    };
    double first = 0, last = 0;
    if (r.kind == RopeKind::yarn) {
        first = pair_of(r.high), last = pair_of(r.low);
        if (r.truncate) first = std::floor(first), last = std::ceil(last);
        first = std::max(first, 0.0), last = std::min(last, 2 * half - 1);
        if (first == last) last += 0.001;
    }
    // How much of a frequency stays.
    const auto kept = [&](double j, double frequency) {
        if (r.kind == RopeKind::plain) return 1.0;
        if (r.kind == RopeKind::linear || r.kind == RopeKind::longrope) return 0.0;
        const double share = r.kind == RopeKind::yarn
                                 ? (last - j) / (last - first)
                                 : (context * frequency / (2 * pi) - r.low) / (r.high - r.low);
        return std::clamp(share, 0.0, 1.0);
    };
    const std::vector<double>& divisors = T > r.original_context ? r.long_factor : r.short_factor;
    std::vector<double> frequencies;
    for (int64_t pair = 0; pair < pairs; pair++) {
        const auto j = static_cast<double>(pair);
        const double frequency = std::pow(c.rope_theta, -j / half), keep = kept(j, frequency);
        const double divisor = divisors.empty() ? r.factor : divisors[static_cast<size_t>(pair)];
        frequencies.push_back((1 - keep) * frequency / divisor + keep * frequency);
    }
    return frequencies;
}

}  // namespace llamac
