#include "train/sample.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/random.h"

namespace llamac {

int32_t pick(const std::vector<float>& logits, const Sampling& sampling, double u) {
    const size_t V = logits.size();
    const size_t k = sampling.temperature == 0 ? 1
                     : sampling.top_k > 0      ? std::min(V, static_cast<size_t>(sampling.top_k))
                                               : V;
    std::vector<int32_t> best(V);
    std::iota(best.begin(), best.end(), 0);
    const auto likelier = [&](int32_t a, int32_t b) {
        return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    };
    std::partial_sort(best.begin(), best.begin() + static_cast<std::ptrdiff_t>(k), best.end(), likelier);
    if (k == 1) return best[0];
    std::vector<double> cumulative(k);
    double sum = 0;
    for (size_t i = 0; i < k; i++) {
        sum += std::exp((double{logits[best[i]]} - double{logits[best[0]]}) / sampling.temperature);
        cumulative[i] = sum;
    }
    const auto at = std::lower_bound(cumulative.begin(), cumulative.end() - 1, u * sum);
    return best[static_cast<size_t>(at - cumulative.begin())];
}

std::vector<int32_t> generate(Model& model, std::vector<int32_t> prompt, int64_t count,
                              const Sampling& sampling, const std::function<void()>& between) {
    std::vector<int32_t> made;
    std::vector<float> logits;
    for (int64_t i = 0; i < count; i++) {
        const int64_t T = std::min<int64_t>(static_cast<int64_t>(prompt.size()), model.options.seq_len);
        next_logits(model, prompt.data() + prompt.size() - static_cast<size_t>(T), T, logits);
        const Philox random = random_block(sampling.seed, sampling.step, sampling_stream, i / 4);
        made.push_back(pick(logits, sampling, uniform(random.bits[i % 4])));
        prompt.push_back(made.back());
        if (between) between();
    }
    return made;
}

}  // namespace llamac
