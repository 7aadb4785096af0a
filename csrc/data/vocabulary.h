// The vocabulary file, tokenizer.vocab: the bytes of each token id, of any tokenizer, as llamac/data/vocabulary.py
// writes them. Little-endian words of 32 bits, then bytes:
//   16 words: 20241124; version 1; n, the number of ids, 1 to 2^22; ids of bos, eos and pad (2^32 - 1: none);
//     the tokenizer's hash, as the shards record it, low and high half; XXH3_64 of everything after these words,
//     likewise; Dropped; five zeros
//   n words: the end of each token's bytes, as an offset from the first token's first byte
//   the bytes of all tokens, in the order of their ids, as the tokenizer's decoder gives them: a text is their
//     concatenation
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace llamac {

// Omitted by decoding: the first space of a text; all spaces at the begin of the first token.
enum class Dropped : uint32_t { nothing, space, first_spaces };

struct Vocabulary {
    std::vector<std::string> tokens;   // bytes of each id, special tokens under their names
    int64_t bos = -1, eos = -1;        // -1: there is none
    uint64_t hash = 0;                 // XXH3_64 of the tokenizer's file, as the shards record it
    Dropped drops = Dropped::nothing;  // by decoding
};

// Whether the content of a file begins as a vocabulary file does.
bool is_vocabulary(std::string_view content);

// Throws Error if the content is malformed or damaged.
Vocabulary parse_vocabulary(std::string_view content, const std::string& path);

// The 16 words before the content, which a file of questions (questions.h) has, too.
struct DataHeader {
    uint32_t count;                     // word 2
    std::array<uint32_t, 3> numbers;    // words 3 to 5
    uint64_t tokenizer_hash, checksum;  // words 6 to 9
    uint32_t kind;                      // word 10
};
constexpr size_t data_header_bytes = 64;
// Throws Error if it is malformed, has another magic number, or a larger kind.
DataHeader parse_header(std::string_view content, const std::string& path, uint32_t magic, uint32_t max_kind);
// Throws Error if what follows the header has another checksum.
void check_checksum(std::string_view content, const std::string& path, const DataHeader& header);

}  // namespace llamac
