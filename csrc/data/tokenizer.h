// Converts token ids to bytes with a rank file in tiktoken's format (lines of `base64(bytes) rank`, ranks 0 .. n-1)
// or with a vocabulary file (vocabulary.h).
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "data/tokens.h"
#include "data/vocabulary.h"

namespace llamac {

// Special tokens follow a file's ranks: Llama 3's 256 behind 128,000 ranks, else <|endoftext|> alone, as in GPT-2.
struct Tokenizer {
    std::string path;
    uint64_t hash = 0;                // XXH3_64 of the rank file, or what the vocabulary file says
    std::vector<std::string> tokens;  // [vocabulary]: bytes of each id, special tokens under their names
    int64_t ranks = 0;                // ordinary tokens of a rank file
    int32_t begin_of_text = -1;  // stands before each document, or behind the one before; -1: there is none
    DocumentMarks marks;         // of its documents in the shards
    Dropped drops = Dropped::nothing;
    bool of_vocabulary = false;  // by a vocabulary file

    // Error where the file is neither a complete rank file nor a vocabulary file.
    explicit Tokenizer(const std::string& path);
    // Bytes, not always valid UTF-8; ids past the vocabulary become 0xFF, which is never valid.
    std::string decode(const std::vector<int32_t>& ids) const;
};

// setting: a path, or "" for none; nullopt: tokenizer.tiktoken, tokenizer.vocab or tokenizer.model
// beside the first shard, if there. Error where a shard says that it was made with another tokenizer.
std::optional<Tokenizer> find_tokenizer(const std::optional<std::string>& setting, const Loader& data);

// Whether the model's directory has the tokenizer that made the data: Error where it has another one. A file of the same
// kind is compared by its hash, tokenizer.json for a vocabulary file, tokenizer.model for a rank file. A directory that has
// a tokenizer.json alone is compared with a rank file by the tokens. A directory without either, and a preset, match.
void check_tokenizer_of_model(const std::string& model, const Tokenizer& tokenizer);

}  // namespace llamac
