// What a run says of its model between steps, whose weights stay as they are: validation, evaluation, samples.
#include <algorithm>

#include "platform/ranges.h"
#include "train/sample.h"
#include "train/trainer.h"

namespace llamac {

double Trainer::validate() {
    const Range range("validation");
    if (!val) fail("validation: expected --val-data, found none");
    const GemmTuning tuning(model.gemms, options.tune);  // they are the training steps' products
    // Rank r takes batches r, r + ranks, ...; where they do not divide, the last ones compute one that does not count.
    const int64_t B = options.batch_size, batches = val->validation_batches(options.val_steps);
    std::vector<double> losses(static_cast<size_t>(batches)), counted = losses;
    for (int64_t first = 0; first < batches; first += ranks.count) {
        const int64_t own = std::min(first + ranks.own, batches - 1);
        int64_t tokens = 0;
        ranks.together("validation data", [&] { tokens = stage_validation(own); });
        const std::vector<double> everybodys = ranks.gather("loss", loss_of_staged(B, options.seq_len)),
                                  their_tokens = ranks.gather("targets", static_cast<double>(tokens));
        for (int64_t rank = 0; rank < std::min(ranks.count, batches - first); rank++) {
            losses[static_cast<size_t>(first + rank)] = everybodys[static_cast<size_t>(rank)];
            counted[static_cast<size_t>(first + rank)] = their_tokens[static_cast<size_t>(rank)];
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

int64_t Trainer::stage_validation(int64_t batch) {
    StagingBuffers& f = staging[0];
    const int64_t B = options.batch_size, T = options.seq_len;
    int32_t* first = model.options.document_mask ? f.first.data : nullptr;
    val->validation_batch(batch, f.tokens.data, f.targets.data, first);
    if (!val->is_packed) find_documents(f, 0, B, T);
    return B * T - std::count(f.targets.data, f.targets.data + B * T, ignore_index);
}

double Trainer::loss_of_staged(int64_t count, int64_t T) {
    CHECK(in_flight() == 0);
    set_batch(model, staging[0].tokens.data, staging[0].targets.data, count, T,
              model.options.document_mask ? staging[0].first.data : nullptr);
    forward(model);
    const double loss = mean_loss(model);
    if (between) between();
    return loss;
}

double Trainer::mean_loss_of(int64_t rows, int64_t T, const Rows& fill) {
    CHECK(rows > 0);
    double sum = 0;
    for (int64_t first = 0; first < rows; first += options.batch_size) {
        const int64_t count = std::min(options.batch_size, rows - first);
        fill(first, count, staging[0].tokens.data, staging[0].targets.data);
        find_documents(staging[0], 0, count, T);
        sum += loss_of_staged(count, T) * static_cast<double>(count);
    }
    return sum / static_cast<double>(rows);
}

std::vector<Score> Trainer::evaluate() {
    CHECK(in_flight() == 0);
    std::vector<Score> scores;
    for (const Questions& each : questions)
        scores.push_back(score(each, likelihoods(model, each, ranks, between)));
    return scores;
}

int32_t Trainer::first_token() const {
    const bool has_own = tokenizer && tokenizer->begin_of_text >= 0;
    const int64_t token = has_own ? tokenizer->begin_of_text : std::max<int64_t>(config.bos, 0);
    if (token >= config.V)
        fail(has_own ? tokenizer->path : "--model " + options.model, ": the token that begins a sample is ",
             token, ", expected one below the vocabulary's ", config.V);
    return static_cast<int32_t>(token);
}

std::vector<int32_t> Trainer::sample_prompt() const {
    const std::vector<int32_t>& ids = options.sample_prompt_ids;
    for (int32_t id : ids)
        if (id >= config.V)
            fail("--sample-prompt-ids: expected ids below the vocabulary's ", config.V, ", found ", id);
    return ids.empty() ? std::vector<int32_t>{first_token()} : ids;
}

std::vector<int32_t> Trainer::sample(std::vector<int32_t> prompt, int64_t count, double temperature,
                                     int64_t top_k) {
    CHECK(in_flight() == 0);
    const Range range("sample");
    return generate(model, std::move(prompt), count,
                    {temperature, top_k, static_cast<uint64_t>(options.seed), static_cast<uint32_t>(step)},
                    between);
}

std::string Trainer::text_of(const std::vector<int32_t>& ids) const {
    if (tokenizer) return tokenizer->decode(ids);
    std::string text;
    for (int32_t id : ids) text += (text.empty() ? "" : " ") + std::to_string(id);
    return text;
}

std::string Trainer::sample() {
    const std::vector<int32_t> prompt = sample_prompt();
    std::vector<int32_t> ids =
        sample(prompt, options.sample_tokens, options.sample_temperature, options.sample_top_k);
    if (!options.sample_prompt_ids.empty()) ids.insert(ids.begin(), prompt.begin(), prompt.end());
    return text_of(ids);
}

}  // namespace llamac
