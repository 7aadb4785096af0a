#include "data/tokenizer.h"

#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_set>

#include "core/json.h"
#include "platform/error.h"

namespace llamac {
namespace {

constexpr int64_t llama3_ranks = 128000;

// 0 .. 63, or -1 for a character that is not in base64's alphabet (RFC 4648).
int sextet(char c) {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

// False where the text is no padded base64.
bool decode_base64(std::string_view text, std::string& bytes) {
    if (text.size() % 4 != 0) return false;
    for (int padding = 0; padding < 2 && !text.empty() && text.back() == '='; padding++)
        text.remove_suffix(1);
    uint32_t bits = 0;
    int held = 0;
    for (char c : text) {
        const int value = sextet(c);
        if (value < 0) return false;
        bits = bits << 6 | static_cast<uint32_t>(value);
        held += 6;
        if (held < 8) continue;
        held -= 8;
        bytes += static_cast<char>(bits >> held & 0xff);
    }
    return true;
}

// "base64 rank" with the rank that is due. Tokens are not empty.
bool parse_line(std::string_view line, size_t rank, std::string& token) {
    const size_t space = line.find(' ');
    return space != std::string_view::npos && decode_base64(line.substr(0, space), token) && !token.empty() &&
           line.substr(space + 1) == std::to_string(rank);
}

void read_ranks(std::string_view text, const std::string& path, std::vector<std::string>& tokens) {
    std::unordered_set<std::string> seen;
    for (int64_t number = 1; !text.empty(); number++) {
        const size_t end = std::min(text.find('\n'), text.size());
        std::string_view line = text.substr(0, end);
        text.remove_prefix(std::min(end + 1, text.size()));
        if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
        if (line.empty()) continue;
        std::string token;
        if (!parse_line(line, tokens.size(), token) || !seen.insert(token).second)
            fail(path, ": line ", number, ": expected a new token in base64 and rank ", tokens.size(),
                 ", found ", quote(line));
        tokens.push_back(std::move(token));
    }
    for (int byte = 0; byte < 256; byte++)
        if (!seen.count(std::string(1, static_cast<char>(byte))))
            fail(path, ": expected a rank for each of the 256 bytes, found none for byte ", byte);
}

void add_llama3_special_tokens(std::vector<std::string>& tokens) {
    // Null: one of the reserved tokens, which are numbered in order.
    const char* named[] = {
        "begin_of_text", "end_of_text",     nullptr,         nullptr,  "finetune_right_pad_id",
        nullptr,         "start_header_id", "end_header_id", "eom_id", "eot_id",
        "python_tag"};
    int reserved = 0;
    for (size_t i = 0; i < 256; i++) {
        const char* name = i < std::size(named) ? named[i] : nullptr;
        const std::string text = name ? name : "reserved_special_token_" + std::to_string(reserved++);
        tokens.push_back("<|" + text + "|>");
    }
}

// The byte that each letter of byte-level BPE stands for, or -1: a printable byte is its own letter, the others follow from
// U+0100 on.
constexpr int letters_end = 0x144;
std::array<int, letters_end> bytes_of_letters() {
    std::array<int, letters_end> bytes;
    bytes.fill(-1);
    int next = 0x100;
    for (int byte = 0; byte < 256; byte++) {
        const bool printable = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
        bytes[printable ? byte : next++] = byte;
    }
    return bytes;
}

// Whether `word`, in UTF-8, has the letters of these bytes.
bool spells(const std::string& word, const std::string& bytes) {
    static const std::array<int, letters_end> byte_of = bytes_of_letters();
    size_t found = 0;
    for (size_t at = 0; at < word.size(); at++, found++) {
        int letter = static_cast<unsigned char>(word[at]);
        if (letter >= 0x80) {  // all such letters have two bytes
            if ((letter & 0xe0) != 0xc0 || ++at == word.size()) return false;
            letter = (letter & 0x1f) << 6 | (static_cast<unsigned char>(word[at]) & 0x3f);
        }
        if (found == bytes.size() || letter >= letters_end ||
            byte_of[letter] != static_cast<unsigned char>(bytes[found]))
            return false;
    }
    return found == bytes.size();
}

// Whether the ordinary tokens of a tokenizer.json are those of the rank file, at the same ids.
bool has_ranks(const nlohmann::json& content, const Tokenizer& tokenizer) {
    std::unordered_set<int64_t> added;
    const auto array = content.find("added_tokens");
    if (array != content.end() && array->is_array())
        for (const auto& token : *array)
            if (token.is_object() && token.contains("id") && token["id"].is_number_integer())
                added.insert(token["id"].get<int64_t>());
    const auto pointer = nlohmann::json::json_pointer("/model/vocab");
    if (!content.contains(pointer) || !content[pointer].is_object()) return false;
    int64_t count = 0;
    for (const auto& [word, value] : content[pointer].items()) {
        const int64_t id = value.is_number_integer() ? value.get<int64_t>() : -1;
        if (added.count(id)) continue;
        if (id < 0 || id >= tokenizer.ranks || !spells(word, tokenizer.tokens[id])) return false;
        count++;
    }
    return count == tokenizer.ranks;
}

}  // namespace

Tokenizer::Tokenizer(const std::string& file_path) : path(file_path) {
    const std::string text = read_file(path);
    if (is_vocabulary(text)) {
        Vocabulary found = parse_vocabulary(text, path);
        tokens = std::move(found.tokens);
        hash = found.hash;
        begin_of_text = static_cast<int32_t>(found.bos >= 0 ? found.bos : found.eos);
        marks = {static_cast<int32_t>(found.bos), static_cast<int32_t>(found.eos)};
        drops = found.drops;
        of_vocabulary = true;
        return;
    }
    hash = XXH3_64bits(text.data(), text.size());
    read_ranks(text, path, tokens);
    ranks = static_cast<int64_t>(tokens.size());
    begin_of_text = static_cast<int32_t>(ranks);  // the first of the special ones
    marks.begin = begin_of_text;
    if (ranks == llama3_ranks) {
        add_llama3_special_tokens(tokens);
        marks.end = begin_of_text + 1;
    } else {
        tokens.push_back("<|endoftext|>");
    }
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids) const {
    std::string bytes;
    size_t first = 0;  // bytes of the first token
    for (const int32_t& id : ids) {
        const auto at = static_cast<size_t>(id);  // a negative id is far past the end
        bytes += at < tokens.size() ? tokens[at] : std::string(1, '\xff');
        if (&id == ids.data()) first = bytes.size();
    }
    if (drops == Dropped::space) first = std::min<size_t>(bytes.size(), 1);
    if (drops == Dropped::nothing) return bytes;
    return bytes.substr(std::min(bytes.find_first_not_of(' '), first));
}

void check_tokenizer_of_model(const std::string& model, const Tokenizer& tokenizer) {
    const auto is_there = [](const std::string& file) { return access(file.c_str(), F_OK) == 0; };
    const auto refuse = [&](const std::string& file, const std::string& found) {
        fail(file, ": expected the tokenizer of the data, ", tokenizer.path, " (XXH3_64 ",
             hex(tokenizer.hash), "), found ", found, "; --tokenizer none disables this check");
    };
    const std::string json = model + "/tokenizer.json",
                      same_kind = tokenizer.of_vocabulary ? json : model + "/tokenizer.model";
    if (is_there(same_kind)) {
        const std::string text = read_file(same_kind);
        const uint64_t found = XXH3_64bits(text.data(), text.size());
        if (found != tokenizer.hash) refuse(same_kind, hex(found));
    } else if (is_there(json) && !has_ranks(read_json(json), tokenizer)) {
        refuse(json, "other tokens");
    }
}

std::optional<Tokenizer> find_tokenizer(const std::optional<std::string>& setting, const Loader& data) {
    if (setting == "") return std::nullopt;
    std::string path = setting.value_or("");
    if (!setting) {
        const std::string& shard = data.shards[0].file.path;
        const std::string folder = shard.substr(0, shard.find_last_of('/') + 1);
        const char* names[] = {"tokenizer.tiktoken", "tokenizer.vocab", "tokenizer.model"};
        const auto is_there = [&](const char* name) { return access((folder + name).c_str(), F_OK) == 0; };
        const auto found = std::find_if(std::begin(names), std::end(names), is_there);
        if (found == std::end(names)) return std::nullopt;
        path = folder + *found;
    }
    Tokenizer tokenizer(path);
    for (const TokenShard& shard : data.shards)
        if (shard.tokenizer_hash != 0 && shard.tokenizer_hash != tokenizer.hash)
            fail(path, ": expected the tokenizer that made ", shard.file.path, " (XXH3_64 ",
                 hex(shard.tokenizer_hash), "), found ", hex(tokenizer.hash));
    return tokenizer;
}

}  // namespace llamac
