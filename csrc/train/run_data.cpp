#include "train/run_data.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/words.h"

namespace llamac {
namespace {

std::optional<Loader> load_data(const std::string& pattern, const Options& o, const Config& config,
                                int64_t accumulation) {
    if (pattern.empty()) return std::nullopt;
    return Loader(pattern, o.seq_len, config.V, o.batch_size, accumulation, static_cast<uint64_t>(o.seed));
}

std::optional<Tokenizer> load_tokenizer(const Options& o, const std::optional<Loader>& train) {
    std::optional<Tokenizer> found;
    if (train)
        found = find_tokenizer(o.tokenizer, *train);
    else if (o.tokenizer && !o.tokenizer->empty())
        found.emplace(*o.tokenizer);
    if (found) check_tokenizer_of_model(o.model, *found);
    return found;
}

// The hash of the tokenizer that made the ids; 0: not known.
uint64_t hash_of_ids(const std::optional<Loader>& train, const std::optional<Tokenizer>& tokenizer) {
    return tokenizer ? tokenizer->hash : train ? train->shards[0].tokenizer_hash : 0;
}

// Packed shards mark the beginnings of documents; in others the tokenizer's tokens do.
void check_documents(const Options& o, const Config& config, const RunData& data) {
    const auto& [train, val, tokenizer, questions] = data;
    const bool is_packed = train && train->is_packed && (!val || val->is_packed);
    if (!o.document_mask || is_packed) return;
    if (!tokenizer)
        fail(
            "--document-mask on: expected the tokenizer of the data, whose tokens tell documents apart, "
            "found "
            "none; --tokenizer FILE names it");
    const auto [begin, end] = tokenizer->marks;
    if (begin < 0 && end < 0)
        fail(tokenizer->path,
             ": --document-mask on: expected a token that begins or ends a text (bos, eos), found neither");
    if (const int32_t last = std::max(begin, end); last >= config.V)
        fail(tokenizer->path,
             ": --document-mask on: expected tokens that begin and end a text below the model's vocabulary "
             "of ",
             config.V, ", found ", last);
}

// Which have no text; llamac/data/tokens.py has the same.
constexpr const char* bert_special_tokens[] = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};

// Validation on the ids of another tokenizer would have a meaningless loss.
void check_same_tokenizer(const Loader& train, const Loader& val) {
    const TokenShard& a = train.shards[0];
    for (const TokenShard& b : val.shards)
        if (a.tokenizer_hash && b.tokenizer_hash && a.tokenizer_hash != b.tokenizer_hash)
            fail(b.file.path, ": expected tokens of the tokenizer that made ", a.file.path,
                 ", found another's");
}

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

// Of the training of an encoder, or, with seed 0, of its validation.
Masking masking_of(const Options& o, const Config& config, const std::optional<Tokenizer>& tokenizer) {
    Masking m{o.mlm_probability, static_cast<int32_t>(o.mask_token),
              std::vector<bool>(static_cast<size_t>(config.V)), 0};
    const auto take = [&](int64_t id) {
        if (id >= 0 && id < config.V) m.special[static_cast<size_t>(id)] = true;
    };
    for (size_t id = 0; tokenizer && id < tokenizer->tokens.size(); id++) {
        const std::string& token = tokenizer->tokens[id];
        if (token == "[MASK]" && m.token < 0) m.token = static_cast<int32_t>(id);
        if (std::ranges::count(bert_special_tokens, token)) take(static_cast<int64_t>(id));
    }
    if (m.token < 0 || m.token >= config.V)
        fail("--mask-token ", o.mask_token < 0 ? "auto" : std::to_string(o.mask_token),
             ": expected the id of the token that replaces masked ones, below the model's vocabulary of ",
             config.V, ", found ",
             m.token >= 0 ? std::to_string(m.token)
             : tokenizer  ? "no [MASK] in " + tokenizer->path
                          : "no tokenizer; --tokenizer FILE names it");
    for (const int64_t id : {int64_t{m.token}, config.pad.value_or(-1)}) take(id);
    if (tokenizer) take(tokenizer->marks.begin), take(tokenizer->marks.end);
    if (!o.mlm_whole_words) return m;
    const auto begins_word = [](const std::string& token) { return token.starts_with(' '); };
    if (!tokenizer || std::ranges::none_of(tokenizer->tokens, begins_word))
        fail(
            "--mlm-whole-words on: expected the tokenizer of the data, with tokens that begin with a space, "
            "found ",
            tokenizer ? "no such token in " + tokenizer->path : "none; --tokenizer FILE names it");
    m.continues.resize(m.special.size());
    for (size_t id = 0; id < std::min(m.special.size(), tokenizer->tokens.size()); id++)
        m.continues[id] = !m.special[id] && !begins_word(tokenizer->tokens[id]);
    return m;
}

}  // namespace

RunData::RunData(const Options& o, const Config& config, int64_t accumulation)
    : train(load_data(o.train_data, o, config, accumulation)),
      val(load_data(o.val_data, o, config, 1)),
      tokenizer(load_tokenizer(o, train)),
      questions(read_questions(o.eval_tasks, config.V, hash_of_ids(train, tokenizer))) {
    if (train && val) check_same_tokenizer(*train, *val);
    if (val) val->validation_batches(o.val_steps);  // refuses too little data before the first step
    check_documents(o, config, *this);
    if (config.causal || (!train && !val)) return;
    const Masking masking = masking_of(o, config, tokenizer);
    if (train) train->masking = masking, train->masking->seed = static_cast<uint64_t>(o.seed);
    if (val) val->masking = masking;
}

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
    if (config.has_dropout) lines.push_back(o.model + ": dropout is not applied");
    if (0 < o.steps && o.steps < o.warmup_steps)
        lines.push_back("--warmup-steps " + std::to_string(o.warmup_steps) + ": the run ends at step " +
                        std::to_string(o.steps) + ", before its learning rate has reached --lr " +
                        nlohmann::json(o.lr).dump());
    if (data.is_packed && !o.document_mask)
        lines.push_back(shard.file.path +
                        ": packed documents see those before them; --document-mask on keeps them apart");
    const double passes =
        static_cast<double>(o.steps) * static_cast<double>(sequences) / static_cast<double>(data.sequences);
    if (passes > 1)
        lines.push_back("--steps " + std::to_string(o.steps) + ": the run reads its training data " +
                        formatted("%.1f", passes) + " times (" + std::to_string(data.sequences) +
                        " sequences)");
    return lines;
}

}  // namespace llamac
