#include "data/vocabulary.h"

#include <xxhash.h>

#include <cstring>

#include "core/file.h"
#include "platform/error.h"

namespace llamac {
namespace {

constexpr uint32_t vocab_magic = 20241124, vocab_version = 1, max_tokens = 1u << 22, no_id = 0xffffffff,
                   max_dropped = static_cast<uint32_t>(Dropped::first_spaces);
constexpr size_t vocab_words = 16, vocab_bytes = 4 * vocab_words;

uint32_t vocab_word_at(std::string_view content, size_t index) {
    uint32_t word = 0;  // little-endian, as every machine that this runs on
    std::memcpy(&word, content.data() + 4 * index, sizeof word);
    return word;
}

uint64_t vocab_pair_at(std::string_view content, size_t index) {
    return vocab_word_at(content, index) | uint64_t{vocab_word_at(content, index + 1)} << 32;
}

void check_vocab_header(std::string_view content, const std::string& path) {
    if (content.size() < vocab_bytes)
        fail(path, ": header: expected ", vocab_bytes, " bytes, found ", content.size());
    if (vocab_word_at(content, 0) != vocab_magic || vocab_word_at(content, 1) != vocab_version)
        fail(path, ": header: expected magic ", vocab_magic, " version ", vocab_version, ", found ",
             vocab_word_at(content, 0), " version ", vocab_word_at(content, 1));
    const uint32_t n = vocab_word_at(content, 2);
    if (n < 1 || n > max_tokens) fail(path, ": header: expected 1 to ", max_tokens, " tokens, found ", n);
    if (vocab_word_at(content, 10) > max_dropped)
        fail(path, ": header word 10: expected a number up to ", max_dropped, ", found ",
             vocab_word_at(content, 10));
    for (size_t word = 11; word < vocab_words; word++)
        if (vocab_word_at(content, word) != 0)
            fail(path, ": header word ", word, ": expected 0, found ", vocab_word_at(content, word));
}

int64_t vocab_id_at(std::string_view content, size_t word, const char* name, const std::string& path) {
    const uint32_t id = vocab_word_at(content, word), n = vocab_word_at(content, 2);
    if (id != no_id && id >= n) fail(path, ": ", name, ": expected an id below ", n, ", found ", id);
    return id == no_id ? -1 : int64_t{id};
}

// The ends of the tokens, ascending; the last one is the end of the file.
std::vector<uint32_t> read_vocab_ends(std::string_view content, const std::string& path) {
    const size_t n = vocab_word_at(content, 2), table = vocab_bytes + 4 * n;
    if (content.size() < table)
        fail(path, ": size: expected ", table, " bytes or more, found ", content.size());
    std::vector<uint32_t> ends(n);
    std::memcpy(ends.data(), content.data() + vocab_bytes, 4 * n);
    for (size_t i = 1; i < n; i++)
        if (ends[i] < ends[i - 1])
            fail(path, ": token ", i, ": expected an end of at least ", ends[i - 1], ", found ", ends[i]);
    if (content.size() != table + ends.back())
        fail(path, ": size: expected ", table + ends.back(), " bytes, found ", content.size());
    return ends;
}

}  // namespace

bool is_vocabulary(std::string_view content) {
    return content.size() >= 4 && vocab_word_at(content, 0) == vocab_magic;
}

Vocabulary parse_vocabulary(std::string_view content, const std::string& path) {
    check_vocab_header(content, path);
    Vocabulary found;
    found.bos = vocab_id_at(content, 3, "bos", path);
    found.eos = vocab_id_at(content, 4, "eos", path);
    found.pad = vocab_id_at(content, 5, "pad", path);
    const std::vector<uint32_t> ends = read_vocab_ends(content, path);
    const std::string_view payload = content.substr(vocab_bytes);
    const uint64_t stored = vocab_pair_at(content, 8), computed = XXH3_64bits(payload.data(), payload.size());
    if (stored != computed)
        fail(path, ": checksum: expected ", hex(stored), ", found ", hex(computed), ": it is damaged");
    found.hash = vocab_pair_at(content, 6);
    found.drops = Dropped{vocab_word_at(content, 10)};
    const std::string_view bytes = payload.substr(4 * ends.size());
    found.tokens.reserve(ends.size());
    uint32_t begin = 0;
    for (const uint32_t end : ends) {
        found.tokens.emplace_back(bytes.substr(begin, end - begin));
        begin = end;
    }
    return found;
}

}  // namespace llamac
