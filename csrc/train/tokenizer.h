// Token ids to bytes, by a rank file in tiktoken's format: lines of `base64(bytes) rank`, ranks 0 .. n-1.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "train/tokens.h"

namespace llamac {

// Special tokens follow the ranks: Llama 3's 256 behind 128,000 ranks, else <|endoftext|> alone, as in GPT-2.
struct Tokenizer {
    std::string path;
    uint64_t hash = 0;                // XXH3_64 of the file
    std::vector<std::string> tokens;  // [vocabulary]: bytes of each id, special tokens under their names
    int64_t ranks = 0;                // ordinary tokens
    int32_t begin_of_text = 0;        // stands before each document: <|begin_of_text|>, or <|endoftext|>

    // Error where the file is no complete rank file.
    explicit Tokenizer(const std::string& path);
    // Bytes, not always valid UTF-8; ids past the vocabulary become 0xFF, which is never valid.
    std::string decode(const std::vector<int32_t>& ids) const;
};

// What --tokenizer means: none; a rank file; auto: tokenizer.tiktoken or tokenizer.model beside the first
// shard, if there. Error where a shard says that it was made with another tokenizer.
std::optional<Tokenizer> find_tokenizer(const std::string& setting, const Loader& data);

}  // namespace llamac
