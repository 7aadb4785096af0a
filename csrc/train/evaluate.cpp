#include "train/evaluate.h"

#include <algorithm>
#include <limits>

#include "platform/ranges.h"
#include "train/sample.h"

namespace llamac {

namespace {

// Mean loss of rows of T tokens in the host memory of the first step, which the ranks of a context axis have alike.
double loss_of_batch(Trainer& t, int64_t rows, int64_t T) {
    CHECK(t.in_flight() == 0);
    const HostBatch batch = t.batches.host(0);
    t.batches.find_ends(batch, rows, T);
    set_batch(t.model, batch.tokens, batch.targets, rows, T, batch.first, batch.end);
    forward(t.model);
    const double loss = t.mean_over_context("loss", t.model.parameters.holds_head() ? mean_loss(t.model) : 0);
    if (t.between) t.between();
    return loss;
}

// Reads a validation batch into the host memory of the first step; returns the number of targets that count.
int64_t read_validation_batch(Trainer& t, int64_t number) {
    const int64_t B = t.options.batch_size, T = t.options.seq_len;
    const HostBatch batch = t.batches.host(0);
    t.data.val->validation_batch(number, batch.tokens, batch.targets, batch.first);
    if (!t.data.val->is_packed) t.batches.find_documents(batch, B, T);
    return B * T - std::count(batch.targets, batch.targets + B * T, ignore_index);
}

}  // namespace

double validate(Trainer& t) {
    const Options& options = t.options;
    const Ranks& ranks = t.ranks;
    const Axis& data = t.mesh.data;
    const Range range("validation");
    if (!t.data.val) fail("validation: expected --val-data, found none");
    const GemmTuning tuning(t.model.gemms, options.tune);  // of the same shapes as in training
    // Data-parallel rank r takes batches r, r + ranks, ...; where they do not divide, the last ones compute one that does not count.
    const int64_t B = options.batch_size, batches = t.data.val->validation_batches(options.val_steps);
    std::vector<double> losses(static_cast<size_t>(batches)), counted = losses;
    for (int64_t first = 0; first < batches; first += data.ranks) {
        const int64_t own = std::min(first + data.rank, batches - 1);
        int64_t tokens = 0;
        ranks.together("validation data", [&] { tokens = read_validation_batch(t, own); });
        const std::vector<double> all_ranks = ranks.gather("loss", loss_of_batch(t, B, options.seq_len)),
                                  their_tokens = ranks.gather("targets", static_cast<double>(tokens));
        for (int64_t rank = 0; rank < std::min(data.ranks, batches - first); rank++) {
            losses[first + rank] = all_ranks[t.mesh.rank_of(0, 0, rank)];
            counted[first + rank] = their_tokens[t.mesh.rank_of(0, 0, rank)];
        }
    }
    double sum = 0, rows = 0;
    for (const double loss : losses) sum += loss * static_cast<double>(B);
    for (const double tokens : counted) rows += tokens / static_cast<double>(options.seq_len);
    if (rows == 0)
        ranks.together("validation data", [&] {
            fail(options.val_data, ": validation: expected a target that counts, found none");
        });
    return sum / rows;
}

double validation_bytes_per_target(const Trainer& t) {
    if (!t.data.val || !t.data.tokenizer) return std::numeric_limits<double>::quiet_NaN();
    const Loader& data = *t.data.val;
    const std::vector<std::string>& tokens = t.data.tokenizer->tokens;
    std::vector<int32_t> inputs(static_cast<size_t>(t.options.batch_size * t.options.seq_len)),
        targets = inputs;
    double bytes = 0, counted = 0;
    for (int64_t i = 0; i < data.validation_batches(t.options.val_steps); i++) {
        data.validation_batch(i, inputs.data(), targets.data());
        for (const int32_t target : targets) {
            if (target == ignore_index) continue;
            counted++;
            const auto id = static_cast<size_t>(target);
            if (id < tokens.size()) bytes += static_cast<double>(tokens[id].size());
        }
    }
    return bytes / counted;
}

double mean_loss_of(Trainer& t, int64_t rows, int64_t T, const FillRows& fill) {
    CHECK(rows > 0);
    if (divisible_length(t.mesh.context, T) != T)
        fail("validate: expected rows of a multiple of 2 * cp = ", 2 * t.mesh.context.ranks,
             " tokens, found ", T);
    const HostBatch batch = t.batches.host(0);
    double sum = 0;
    for (int64_t first = 0; first < rows; first += t.options.batch_size) {
        const int64_t count = std::min(t.options.batch_size, rows - first);
        fill(first, count, batch.tokens, batch.targets);
        t.batches.find_documents(batch, count, T);
        sum += loss_of_batch(t, count, T) * static_cast<double>(count);
    }
    return sum / static_cast<double>(rows);
}

std::vector<Score> evaluate(Trainer& t) {
    CHECK(t.in_flight() == 0);
    std::vector<Score> scores;
    for (const Questions& each : t.data.questions)
        scores.push_back(score(each, likelihoods(t.model, each, t.ranks, t.mesh, t.between)));
    return scores;
}

int32_t first_token(const Trainer& t) {
    const std::optional<Tokenizer>& tokenizer = t.data.tokenizer;
    const bool has_own = tokenizer && tokenizer->begin_of_text >= 0;
    const int64_t token = has_own ? tokenizer->begin_of_text : std::max<int64_t>(t.config.bos, 0);
    if (token >= t.config.V)
        fail(has_own ? tokenizer->path : "--model " + t.options.model, ": the token that begins a sample is ",
             token, ", expected one below the vocabulary's ", t.config.V);
    return static_cast<int32_t>(token);
}

std::vector<int32_t> sample_prompt(const Trainer& t) {
    const std::vector<int32_t>& ids = t.options.sample_prompt_ids;
    for (int32_t id : ids)
        if (id >= t.config.V)
            fail("--sample-prompt-ids: expected ids below the vocabulary's ", t.config.V, ", found ", id);
    return ids.empty() ? std::vector<int32_t>{first_token(t)} : ids;
}

std::vector<int32_t> sample(Trainer& t, std::vector<int32_t> prompt, int64_t count, double temperature,
                            int64_t top_k) {
    CHECK(t.in_flight() == 0);
    if (!t.config.causal)
        fail("--model ", t.options.model, ": a model of type ", t.config.model_type, " generates no text");
    const Range range("sample");
    return generate(
        t.model, std::move(prompt), count,
        {temperature, top_k, static_cast<uint64_t>(t.options.seed), static_cast<uint32_t>(t.step)},
        t.between);
}

std::string text_of(const Trainer& t, const std::vector<int32_t>& ids) {
    if (t.data.tokenizer) return t.data.tokenizer->decode(ids);
    std::string text;
    for (int32_t id : ids) text += (text.empty() ? "" : " ") + std::to_string(id);
    return text;
}

std::string sample_text(Trainer& t) {
    const Options& options = t.options;
    const std::vector<int32_t> prompt = sample_prompt(t);
    std::vector<int32_t> ids =
        sample(t, prompt, options.sample_tokens, options.sample_temperature, options.sample_top_k);
    if (!options.sample_prompt_ids.empty()) ids.insert(ids.begin(), prompt.begin(), prompt.end());
    return text_of(t, ids);
}

}  // namespace llamac
