#include "train/warnings.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace llamac {
namespace {

// Generation begins and ends with the ids of config.json, documents of the data with those of its tokenizer.
std::vector<std::string> special_token_warnings(const Config& config, const Tokenizer& tokenizer) {
    const int64_t begin = tokenizer.marks.begin, end = tokenizer.marks.end >= 0 ? tokenizer.marks.end : begin;
    std::vector<std::string> lines;
    const auto differs = [&](const char* field, const std::string& found, int64_t expected) {
        lines.push_back(std::string("config.json: ") + field + ": expected " + std::to_string(expected) +
                        ", which the documents of the data have (" + tokenizer.path + "), found " + found);
    };
    if (begin >= 0 && config.bos != begin)
        differs("bos_token_id", config.bos < 0 ? "none" : std::to_string(config.bos), begin);
    if (end >= 0 && std::find(config.eos.begin(), config.eos.end(), end) == config.eos.end())
        differs("eos_token_id", config.eos.empty() ? "none" : nlohmann::json(config.eos).dump(), end);
    return lines;
}

}  // namespace

std::vector<std::string> run_warnings(const Options& o, const Config& config, const RunData& run_data,
                                      int64_t sequences) {
    const Loader& data = *run_data.train;
    std::vector<std::string> lines;
    if (run_data.tokenizer) lines = special_token_warnings(config, *run_data.tokenizer);
    const TokenShard& shard = data.shards[0];
    const std::string tokens = std::to_string(shard.vocab_size), model = std::to_string(config.V);
    if (shard.vocab_size && shard.vocab_size != config.V)
        lines.push_back(shard.file.path + ": tokens of a vocabulary of " + tokens + ", the model's is " +
                        model +
                        (o.init == Init::load ? ": were the weights trained on these tokens?"
                                              : ": the ids from " + tokens + " on never occur"));
    if (0 < o.steps && o.steps < o.warmup_steps)
        lines.push_back("--warmup-steps " + std::to_string(o.warmup_steps) + ": the run ends at step " +
                        std::to_string(o.steps) + ", before its learning rate has reached --lr " +
                        nlohmann::json(o.lr).dump());
    if (data.is_packed && !o.document_mask)
        lines.push_back(shard.file.path +
                        ": packed documents see those before them; --document-mask on keeps them apart");
    const double passes =
        static_cast<double>(o.steps) * static_cast<double>(sequences) / static_cast<double>(data.sequences);
    if (passes > 1) {
        char text[32];
        std::snprintf(text, sizeof text, "%.1f", passes);
        lines.push_back("--steps " + std::to_string(o.steps) + ": the run reads its training data " + text +
                        " times (" + std::to_string(data.sequences) + " sequences)");
    }
    return lines;
}

}  // namespace llamac
