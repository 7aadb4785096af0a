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
    uint64_t hash = 0;                // XXH3_64 of the rank file, or the hash in the vocabulary file
    std::vector<std::string> tokens;  // [vocabulary]: bytes of each id, special tokens under their names
    int64_t ranks = 0;                // ordinary tokens of a rank file
    int32_t begin_of_text = -1;       // precedes each document; -1: there is none
    DocumentMarks marks;              // of its documents in the shards
    Dropped drops = Dropped::nothing;
    bool of_vocabulary = false;  // by a vocabulary file

    // Throws Error if the file is neither a complete rank file nor a vocabulary file.
    explicit Tokenizer(const std::string& path);
    // Bytes, not always valid UTF-8; ids past the vocabulary become 0xFF, which is never valid.
    std::string decode(const std::vector<int32_t>& ids) const;
};

// setting: a path, or "" for none; nullopt: tokenizer.tiktoken, tokenizer.vocab or tokenizer.model
// beside the first shard, if there. Throws Error if a shard names another tokenizer.
std::optional<Tokenizer> find_tokenizer(const std::optional<std::string>& setting, const Loader& data);

// Throws Error if the model's directory has another tokenizer than the data: by the hash of tokenizer.json for a vocabulary
// file, of tokenizer.model for a rank file; by the tokens of tokenizer.json if it is the only file. A preset and a directory
// without them match.
void check_tokenizer_of_model(const std::string& model, const Tokenizer& tokenizer);

}  // namespace llamac
