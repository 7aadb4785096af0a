#include "data/vocabulary.h"

#include <xxhash.h>

#include <cstring>

#include "core/file.h"
#include "platform/error.h"

namespace llamac {
namespace {

constexpr uint32_t vocab_magic = 20241124, max_tokens = 1u << 22, no_id = 0xffffffff;

uint32_t word_at(std::string_view content, size_t index) {
    uint32_t word = 0;  // little-endian, as every machine that this runs on
    std::memcpy(&word, content.data() + 4 * index, sizeof word);
    return word;
}

uint64_t pair_at(std::string_view content, size_t index) {
    return word_at(content, index) | uint64_t{word_at(content, index + 1)} << 32;
}

int64_t checked_id(uint32_t id, uint32_t tokens, const char* name, const std::string& path) {
    if (id != no_id && id >= tokens)
        fail(path, ": ", name, ": expected an id below ", tokens, ", found ", id);
    return id == no_id ? -1 : int64_t{id};
}

// The ends of the tokens, ascending; the last one is the end of the file.
std::vector<uint32_t> read_ends(std::string_view content, size_t tokens, const std::string& path) {
    const size_t table = data_header_bytes + 4 * tokens;
    if (content.size() < table)
        fail(path, ": size: expected ", table, " bytes or more, found ", content.size());
    std::vector<uint32_t> ends(tokens);
    std::memcpy(ends.data(), content.data() + data_header_bytes, 4 * tokens);
    for (size_t i = 1; i < tokens; i++)
        if (ends[i] < ends[i - 1])
            fail(path, ": token ", i, ": expected an end of at least ", ends[i - 1], ", found ", ends[i]);
    if (content.size() != table + ends.back())
        fail(path, ": size: expected ", table + ends.back(), " bytes, found ", content.size());
    return ends;
}

}  // namespace

DataHeader parse_header(std::string_view content, const std::string& path, uint32_t magic,
                        uint32_t max_kind) {
    constexpr uint32_t version = 1;
    const auto word = [&](size_t index) { return word_at(content, index); };
    if (content.size() < data_header_bytes)
        fail(path, ": header: expected ", data_header_bytes, " bytes, found ", content.size());
    if (word(0) != magic || word(1) != version)
        fail(path, ": header: expected magic ", magic, " version ", version, ", found ", word(0), " version ",
             word(1));
    if (word(10) > max_kind)
        fail(path, ": header word 10: expected a number up to ", max_kind, ", found ", word(10));
    for (size_t index = 11; index < data_header_bytes / 4; index++)
        if (word(index) != 0) fail(path, ": header word ", index, ": expected 0, found ", word(index));
    return {word(2), {word(3), word(4), word(5)}, pair_at(content, 6), pair_at(content, 8), word(10)};
}

void check_checksum(std::string_view content, const std::string& path, const DataHeader& header) {
    const std::string_view payload = content.substr(data_header_bytes);
    if (const uint64_t found = XXH3_64bits(payload.data(), payload.size()); found != header.checksum)
        fail(path, ": checksum: expected ", hex(header.checksum), ", found ", hex(found), ": it is damaged");
}

bool is_vocabulary(std::string_view content) {
    return content.size() >= 4 && word_at(content, 0) == vocab_magic;
}

Vocabulary parse_vocabulary(std::string_view content, const std::string& path) {
    const DataHeader header =
        parse_header(content, path, vocab_magic, static_cast<uint32_t>(Dropped::first_spaces));
    const uint32_t n = header.count;
    if (n < 1 || n > max_tokens) fail(path, ": header: expected 1 to ", max_tokens, " tokens, found ", n);
    Vocabulary found;
    found.bos = checked_id(header.numbers[0], n, "bos", path);
    found.eos = checked_id(header.numbers[1], n, "eos", path);
    checked_id(header.numbers[2], n, "pad", path);
    const std::vector<uint32_t> ends = read_ends(content, n, path);
    check_checksum(content, path, header);
    found.hash = header.tokenizer_hash;
    found.drops = Dropped{header.kind};
    const std::string_view bytes = content.substr(data_header_bytes + 4 * ends.size());
    found.tokens.reserve(ends.size());
    uint32_t begin = 0;
    for (const uint32_t end : ends) {
        found.tokens.emplace_back(bytes.substr(begin, end - begin));
        begin = end;
    }
    return found;
}

}  // namespace llamac
