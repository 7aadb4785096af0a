#include "train/sample.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/random.h"

namespace llamac {
namespace {

// In (0,1), for token i of a sequence.
double random_place(const Sampling& sampling, int64_t i) {
    const Philox random = random_block(sampling.seed, sampling.step, sampling_stream, i / 4);
    return uniform(random.bits[i % 4]);
}

// The prompts first .. first+lengths.size() as one batch.
struct Batch {
    Model& model;
    const std::vector<std::vector<int32_t>>& prompts;
    const Ending& ending;
    std::span<const Sampling> samplings;  // of all prompts
    const std::function<bool(size_t prompt, int32_t token)>& made;
    std::vector<std::vector<int32_t>>& results;
    size_t first, count;
    TokenChoice& choice;
    std::vector<bool> ended = std::vector<bool>(count, false);
    std::vector<int32_t> last = std::vector<int32_t>(count);

    void add(size_t b, std::span<const float> logits) {
        if (ended[b]) return;
        const Sampling& s = samplings[first + b];
        const auto made_so_far = static_cast<int64_t>(results[first + b].size());
        add(b, choice.pick(logits, s, random_place(s, made_so_far)));
    }

    void add(size_t b, int32_t token) {
        if (ended[b]) return;
        std::vector<int32_t>& own = results[first + b];
        own.push_back(token);
        last[b] = token;
        const auto& stops = ending.stops;
        ended[b] = static_cast<int64_t>(own.size()) == ending.count ||
                   std::find(stops.begin(), stops.end(), token) != stops.end();
        if (made && !made(first + b, token)) ended[b] = true;
    }

    void run() {
        std::vector<int64_t> lengths;
        for (size_t b = 0; b < count; b++) lengths.push_back(static_cast<int64_t>(prompts[first + b].size()));
        begin_sequences(model, lengths);
        std::vector<float> logits;
        for (size_t b = 0; b < count; b++) {
            results[first + b].reserve(static_cast<size_t>(ending.count));
            prefill(model, static_cast<int64_t>(b), prompts[first + b], logits);
            add(b, logits);
        }
        const auto own = samplings.subspan(first, count);
        if (std::all_of(own.begin(), own.end(), [](const Sampling& s) { return s.temperature == 0; }))
            return take_argmax();
        const auto V = static_cast<size_t>(model.whole.V);
        while (goes_on()) {
            decode(model, last, logits);
            for (size_t b = 0; b < count; b++) add(b, std::span(logits).subspan(b * V, V));
        }
    }

    bool goes_on() const { return std::find(ended.begin(), ended.end(), false) != ended.end(); }
    // Whether a sequence may want a token behind the next one.
    bool may_go_on() const {
        for (size_t b = 0; b < count; b++)
            if (!ended[b] && static_cast<int64_t>(results[first + b].size()) + 1 < ending.count) return true;
        return false;
    }

    // The device finds tokens and reads them by itself: on a GPU, the host tells one on while the next one is computed,
    // for nothing where it is the last.
    void take_argmax() {
        const bool runs_ahead = model.context.backend == Backend::device;
        if (goes_on()) queue_argmax(model, last);
        while (goes_on()) {
            const bool ahead = runs_ahead && may_go_on() && model.cache->end < model.cache->size.positions;
            if (ahead) queue_argmax(model);
            finish_argmax(model, last);
            for (size_t b = 0; b < count; b++) add(b, last[b]);
            if (!ahead && goes_on()) queue_argmax(model);
        }
    }
};

}  // namespace

// Sorts the first `count` of the `among` likeliest.
void TokenChoice::sort(std::span<const float> logits, size_t count, size_t among) {
    const auto likelier = [&](int32_t a, int32_t b) {
        return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    };
    const auto at = [&](size_t i) { return best.begin() + static_cast<std::ptrdiff_t>(i); };
    const size_t end = std::min(count, among);
    std::partial_sort(at(sorted), at(end), best.end(), likelier);
    sorted = end;
}

int32_t TokenChoice::pick(std::span<const float> logits, const Sampling& sampling, double u) {
    const size_t V = logits.size();
    const size_t k = sampling.temperature == 0 ? 1
                     : sampling.top_k > 0      ? std::min(V, static_cast<size_t>(sampling.top_k))
                                               : V;
    // Of equals, the first.
    if (k == 1) return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    best.resize(V);
    std::iota(best.begin(), best.end(), 0);
    sorted = 0;
    // All of them are rarely wanted in order: then the likeliest come in portions, each as long as all before.
    sort(logits, k < V ? k : 256, k);
    const double largest = logits[best[0]];
    const auto weight = [&](int32_t id) {
        return std::exp((double{logits[id]} - largest) / sampling.temperature);
    };
    double sum = 0;
    for (size_t i = 0; i < k; i++) sum += weight(best[i]);
    // From here on a sum over the likeliest, until it has reached `target`, or all but one.
    size_t i = 0;
    double reached = 0;
    const auto advance = [&](double target) {
        for (reached = weight(best[i = 0]); reached < target && i + 1 < k; reached += weight(best[++i]))
            if (i + 1 == sorted) sort(logits, 2 * sorted, k);
    };
    if (sampling.top_p < 1) {
        advance(sampling.top_p * sum);
        sum = reached;
    }
    advance(u * sum);
    return best[i];
}

std::vector<int32_t> generate(Model& model, std::vector<int32_t> prompt, int64_t count,
                              const Sampling& sampling, const std::function<void()>& between) {
    std::vector<int32_t> made;
    made.reserve(static_cast<size_t>(count));
    prompt.reserve(prompt.size() + static_cast<size_t>(count));
    std::vector<float> logits;
    TokenChoice choice;
    for (int64_t i = 0; i < count; i++) {
        const auto length = static_cast<int64_t>(prompt.size());
        if (model.cache && length <= model.cache->size.positions) {
            if (i == 0) {
                begin_sequences(model, {&length, 1});
                prefill(model, 0, prompt, logits);
            } else {
                decode(model, {&prompt.back(), 1}, logits);
            }
        } else {
            const int64_t T = std::min(length, model.options.seq_len);
            next_logits(model, prompt.data() + length - T, T, logits);
        }
        made.push_back(choice.pick(logits, sampling, random_place(sampling, i)));
        prompt.push_back(made.back());
        if (between) between();
    }
    return made;
}

std::vector<std::vector<int32_t>> generate_all(
    Model& model, const std::vector<std::vector<int32_t>>& prompts, const Ending& ending,
    std::span<const Sampling> samplings, const std::function<bool(size_t prompt, int32_t token)>& made) {
    CHECK(model.cache && ending.count > 0 && samplings.size() == prompts.size());
    const CacheSize size = model.cache->size;
    for (size_t p = 0; p < prompts.size(); p++) {
        const auto length = static_cast<int64_t>(prompts[p].size());
        if (length == 0) fail("prompt ", p + 1, ": expected at least one token, found none");
        // The last token is not read again.
        if (length + ending.count - 1 > size.positions)
            fail("prompt ", p + 1, ": expected a prompt that leaves room for ", ending.count,
                 " tokens in a context of ", size.positions, ", found one of ", length, " tokens");
    }
    std::vector<std::vector<int32_t>> results(prompts.size());
    TokenChoice choice;
    const auto max_sequences = static_cast<size_t>(size.sequences);
    for (size_t first = 0; first < prompts.size(); first += max_sequences)
        Batch{model, prompts, ending, samplings,
              made,  results, first,  std::min(max_sequences, prompts.size() - first),
              choice}
            .run();
    return results;
}

}  // namespace llamac
