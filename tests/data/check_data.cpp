// Tokens, the tokenizer and the vocabulary: known values, and malformed files refused in one line that names them (run it
// under ASan and UBSan). tests/model/test_agreement.py compares the order of the data with Python.
#include "check.h"

#include <cstring>
#include <nlohmann/json.hpp>

#include "data/tokenizer.h"
#include "data/tokens.h"
#include "model/config.h"
#include "vocabulary_file.h"

using namespace llamac;

namespace data_checks {
namespace {

// ---- tokens ----

std::string header(uint32_t magic, uint32_t version, uint64_t n, uint32_t vocab_size = 0, uint64_t hash = 0) {
    std::vector<uint32_t> words(256, 0);
    words[0] = magic, words[1] = version, words[2] = static_cast<uint32_t>(n), words[3] = vocab_size;
    words[5] = static_cast<uint32_t>(n >> 32);
    words[6] = static_cast<uint32_t>(hash), words[7] = static_cast<uint32_t>(hash >> 32);
    return bytes_of(words);
}
std::string narrow_bin(const std::vector<uint16_t>& tokens, uint32_t vocab_size = 0, uint64_t hash = 0) {
    return header(20240520, 1, tokens.size(), vocab_size, hash) + bytes_of(tokens);
}
std::string wide_bin(const std::vector<uint32_t>& tokens, uint32_t vocab_size = 0, uint64_t hash = 0) {
    return header(20240801, 7, tokens.size(), vocab_size, hash) + bytes_of(tokens);
}

// Headers and sizes: test_data.py, in C and Python; cut files: test_readers.py.
TEST(check_bin_header) {
    const std::string path = in_folder("x.bin");
    // n * width wraps to the right size.
    refused(".bin count wraps", {path, "9223372036854775810 tokens"},
            [&] { TokenShard(put("x.bin", header(20240520, 1, (uint64_t{1} << 63) + 2) + "1234")); });
    refused(".bin missing", {"none_*.bin", "no such file"},
            [] { Loader(in_folder("none_*.bin"), 4, 10, 1); });
    put("x.bin", narrow_bin({1, 2, 3, 4}));
    refused(".bin shorter than a sequence", {path, "seq-len + 1 = 5", "found 4"},
            [&] { Loader(path, 4, 10, 1); });
    refused(".bin without tokens", {path, "found 0"},
            [&] { Loader(put("x.bin", narrow_bin({})), 4, 10, 1); });
    refused(".bin with a larger vocabulary", {path, "at most the model's 10", "found 11"},
            [&] { Loader(put("x.bin", narrow_bin({1, 2, 3, 4, 5}, 11)), 4, 10, 1); });
}

TEST(check_token_ids) {
    std::vector<int32_t> tokens(4), targets(4);
    const auto read = [&](const std::string& bytes) {
        Loader(put("x.bin", bytes), 4, 10, 1).micro_batch(0, 0, 0, 1, tokens.data(), targets.data());
    };
    check(error_of([&] { read(narrow_bin({9, 0, 9, 0, 9})); }).empty(), "largest id");
    check(tokens == std::vector<int32_t>{9, 0, 9, 0} && targets == std::vector<int32_t>{0, 9, 0, 9});
    refused("id past the vocabulary", {"x.bin: token 2:", "below 10", "found 10"},
            [&] { read(narrow_bin({1, 2, 10, 4, 5})); });
    refused("last target", {"x.bin: token 4:", "found 65535"},
            [&] { read(narrow_bin({1, 2, 3, 4, 65535})); });
    refused("id of 32 bits", {"x.bin: token 4:", "found 4294967295"},
            [&] { read(wide_bin({1, 2, 3, 4, ~0u})); });
}

std::string packed_bin(const std::vector<uint32_t>& words, uint32_t packed) {
    std::string bytes = wide_bin(words);
    std::memcpy(&bytes[16], &packed, 4);
    return bytes;
}

// Two sequences of whole documents: [1 2 3][4] and [5 6] with two tokens that fill.
TEST(check_packed) {
    constexpr uint32_t B = begins_document | no_target, N = no_target;
    const std::vector<uint32_t> words{1 | B, 2, 3, 4 | B, 5 | B, 6, N | 0 | B, N | 0, N | 0};
    const std::string path = put("x.bin", packed_bin(words, 4));
    const Loader loader(path, 4, 10, 2);
    check(loader.is_packed && loader.sequences == 2, "packed sequences");
    std::vector<int32_t> tokens(8), targets(8), first(8, -1);
    loader.validation_batch(0, tokens.data(), targets.data(), first.data());
    check(tokens == std::vector<int32_t>{1, 2, 3, 4, 5, 6, 0, 0}, "packed tokens");
    check(targets == std::vector<int32_t>{2, 3, -100, -100, 6, -100, -100, -100}, "packed targets");
    check(first == std::vector<int32_t>{0, 0, 0, 3, 0, 0, 2, 2}, "packed documents");
    std::vector<int32_t> same(8);
    loader.validation_batch(0, tokens.data(), same.data());
    check(same == targets, "packed targets without documents");
    refused("packed for another length", {path, "header word 4", "--seq-len 8", "found 4"},
            [&] { Loader(path, 8, 10, 1); });
    std::filesystem::create_directory(in_folder("packed"));
    put("packed/a.bin", wide_bin(words));
    put("packed/b.bin", packed_bin(words, 4));
    refused("packed behind plain", {"b.bin", "plain tokens as in", "a.bin", "found 4"},
            [] { Loader(in_folder("packed/*.bin"), 4, 10, 1); });
    put("packed/c.bin", wide_bin(words));
    std::filesystem::remove(in_folder("packed/a.bin"));
    refused("plain behind packed", {"c.bin", "--seq-len 4", "found plain tokens"},
            [] { Loader(in_folder("packed/*.bin"), 4, 10, 1); });
    refused("packed id", {"x.bin: token 2:", "below 10", "found 10"}, [&] {
        const Loader wrong(put("x.bin", packed_bin({1 | B, 2, 10 | N, 4, N}, 4)), 4, 10, 1);
        wrong.validation_batch(0, tokens.data(), targets.data());
    });
    refused("marks in a plain file", {"x.bin: token 0:", "below 10"}, [&] {
        Loader(put("x.bin", wide_bin(words)), 4, 10, 1).validation_batch(0, tokens.data(), targets.data());
    });
}

// More than 2^31 tokens, more than 2^32 bytes, in a file of holes.
TEST(check_large_shard) {
    const int64_t n = (int64_t{1} << 31) + 1000, T = 8;
    const std::string path = put("large.bin", header(20240520, 1, static_cast<uint64_t>(n)));
    std::filesystem::resize_file(path, static_cast<uintmax_t>(1024 + 2 * (n - 1)));
    std::ofstream(path, std::ios::binary | std::ios::app) << bytes_of<uint16_t>({77});
    const Loader loader(path, T, 100, 1);
    check(loader.tokens == n && loader.sequences == (n - 1) / T, "sequences of a large shard");
    const TokenShard& shard = loader.shards[0];
    uint32_t last[2] = {};
    shard.read(n - 2, 2, 100, last);
    check(last[0] == 0 && last[1] == 77, "end of a large shard");
    std::vector<int32_t> tokens(T), targets(T);
    loader.validation_batch(loader.sequences - 1, tokens.data(), targets.data());
    const int64_t tail = n - 1 - loader.sequences * T;  // tokens behind the last target
    check(tail == 7 && std::count(targets.begin(), targets.end(), 0) == T, "last sequence of a large shard");
    refused("id in a large shard", {path, "token 2147484647", "found 77"},
            [&] { shard.read(n - 1, 1, 77, last); });
    std::filesystem::remove(path);
}

TEST(check_validation_batches) {
    const Loader loader(put("x.bin", wide_bin(std::vector<uint32_t>(31))), 3, 1000, 2);
    check(loader.validation_batches(100) == 5 && loader.validation_batches(2) == 2);
    refused("fewer than a batch", {"x.bin", "a batch of 11 sequences, found 10"},
            [&] { Loader(in_folder("x.bin"), 3, 1000, 11).validation_batches(1); });
}

// ---- tokenizer ----

std::string base64(const std::string& bytes) {
    const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string text;
    for (size_t i = 0; i < bytes.size(); i += 3) {
        uint32_t bits = 0;
        for (size_t k = 0; k < 3; k++)
            bits = bits << 8 | (i + k < bytes.size() ? static_cast<uint8_t>(bytes[i + k]) : 0);
        for (size_t k = 0; k < 4; k++)
            text += i + k <= bytes.size() ? digits[bits >> (18 - 6 * k) & 63] : '=';
    }
    return text;
}

// The 256 bytes, then numbers as text, n ranks in all.
std::string rank_file(int n) {
    std::string text;
    for (int i = 0; i < n; i++)
        text += base64(i < 256 ? std::string(1, static_cast<char>(i)) : "t" + std::to_string(i)) + " " +
                std::to_string(i) + "\n";
    return text;
}

TEST(check_tokenizer) {
    const std::string good = rank_file(300), path = put("good.tiktoken", good);
    const Tokenizer tokenizer(path);
    check(tokenizer.hash == hash_file(path), "hash of the rank file");
    check(tokenizer.ranks == 300 && tokenizer.tokens.size() == 301 && tokenizer.begin_of_text == 300);
    check(tokenizer.marks.begin == 300 && tokenizer.marks.end == -1, "a token before each document");
    check(tokenizer.decode({300, 'h', 'i', 0, 255, 299}) == std::string("<|endoftext|>hi\0\xfft299", 21));
    check(tokenizer.decode({301, -1, 2147483647}) == "\xff\xff\xff" && tokenizer.decode({}).empty());

    const Tokenizer llama3(put("llama3.model", rank_file(128000)));
    check(llama3.tokens.size() == 128256 && llama3.begin_of_text == 128000, "Llama 3's vocabulary");
    check(llama3.marks.begin == 128000 && llama3.marks.end == 128001, "Llama 3's documents");
    int32_t id = 127999;
    for (const char* text :
         {"t127999", "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>",
          "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>",
          "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
          "<|reserved_special_token_3|>"})
        check(llama3.decode({id++}) == text, text);
    check(llama3.decode({128255}) == "<|reserved_special_token_247|>");

    const std::string bad = in_folder("bad.tiktoken");
    for (const char* line : {"dGhl\n", "dGhl 301\n", "dGhl 299\n", "dGhl +300\n", "dGhl x\n",
                             "dGhl 99999999999999999999\n", " 300\n", "==== 300\n", "d!hl 300\n", "dGh 300\n",
                             "dG=l 300\n", "dGhl 300 1\n", "dGhl\x01 300\n", "AA== 300\n"})
        refused(line, {bad, "line 301", "rank 300"}, [&] { Tokenizer(put("bad.tiktoken", good + line)); });
}

TEST(check_vocabulary) {
    const std::vector<std::string> tokens = {" a", "<s>", "", std::string("\0\xff", 2), " "};
    const Tokenizer plain(put("plain.vocab", vocabulary_file(tokens)));
    check(plain.tokens == tokens && plain.hash == (uint64_t{6} << 32 | 5) && plain.begin_of_text == 1);
    check(plain.marks.begin == 1 && plain.marks.end == -1, "documents of a vocabulary file");
    check(plain.decode({0, 4, 3, 2, 1, 9, -1}) == std::string(" a \0\xff<s>\xff\xff", 10), "decode");
    const Tokenizer dropping(put("dropping.vocab", vocabulary_file(tokens, 1)));
    check(dropping.decode({0, 0}) == "a a" && dropping.decode({1, 0}) == "<s> a" &&
          dropping.decode({}).empty());
    const Tokenizer all(put("all.vocab", vocabulary_file({"  a", "  ", "<s>"}, 2)));
    check(all.decode({0, 0}) == "a  a" && all.decode({1, 1}) == "  " && all.decode({2, 1}) == "<s>  " &&
          all.decode({}).empty());
    std::string damaged = vocabulary_file(tokens);
    damaged.back() ^= 1;
    refused("a damaged vocabulary file", {"damaged.vocab", "checksum"},
            [&] { Tokenizer(put("damaged.vocab", damaged)); });
}

// As a byte-level tokenizer.json writes them: printable bytes are themselves, the others U+0100 and up.
std::string letters_of(const std::string& bytes) {
    std::string word;
    for (const char c : bytes) {
        const int byte = static_cast<unsigned char>(c);
        int letter = byte;
        if (byte <= 0x20) letter = 0x100 + byte;
        if (byte >= 0x7f && byte <= 0xa0) letter = 0x100 + 0x21 + byte - 0x7f;
        if (byte == 0xad) letter = 0x143;
        if (letter < 0x80)
            word += static_cast<char>(letter);
        else
            (word += static_cast<char>(0xc0 | letter >> 6)) += static_cast<char>(0x80 | (letter & 0x3f));
    }
    return word;
}

TEST(check_tokenizer_of_a_model) {
    std::filesystem::create_directory(in_folder("model"));
    const Tokenizer ranks(put("same.tiktoken", rank_file(300)));
    const Tokenizer vocabulary(put("same.vocab", vocabulary_file({"a", "b"})));
    check_tokenizer_of_model(in_folder("model"), ranks);  // it has none
    put("model/tokenizer.model", rank_file(300));
    check_tokenizer_of_model(in_folder("model"), ranks);
    check_tokenizer_of_model(in_folder("model"), vocabulary);  // of another kind
    put("model/tokenizer.json", "{}");
    check_tokenizer_of_model(in_folder("model"), ranks);
    refused("another tokenizer.json", {"model/tokenizer.json", "same.vocab", "0000000600000005", "none"},
            [&] { check_tokenizer_of_model(in_folder("model"), vocabulary); });
    put("model/tokenizer.model", rank_file(301));
    refused("another rank file", {"model/tokenizer.model", "same.tiktoken"},
            [&] { check_tokenizer_of_model(in_folder("model"), ranks); });

    std::filesystem::remove(in_folder("model/tokenizer.model"));
    nlohmann::json content = {{"added_tokens", {{{"id", 300}, {"content", "<|end|>"}}}}};
    for (size_t id = 0; id < 300; id++) content["model"]["vocab"][letters_of(ranks.tokens[id])] = id;
    content["model"]["vocab"]["<|end|>"] = 300;
    const auto compare = [&](const nlohmann::json& json) {
        put("model/tokenizer.json", json.dump());
        check_tokenizer_of_model(in_folder("model"), ranks);
    };
    compare(content);
    nlohmann::json less = content, swapped = content, more = content;
    less["model"]["vocab"].erase(letters_of(ranks.tokens[299]));
    std::swap(swapped["model"]["vocab"]["a"], swapped["model"]["vocab"]["b"]);
    more["model"]["vocab"]["\u732b"] = 301;
    for (const auto& json : {less, swapped, more, nlohmann::json::object()})
        refused("a tokenizer.json of other tokens", {"model/tokenizer.json", "same.tiktoken", "other tokens"},
                [&] { compare(json); });
}

TEST(check_find_tokenizer) {
    std::filesystem::create_directory(in_folder("data"));
    const auto loader = [](uint64_t hash) {
        put("data/a.bin", narrow_bin({1, 2, 3}, 301));
        put("data/b.bin", narrow_bin({1, 2, 3}, 301, hash));
        return Loader(in_folder("data/*.bin"), 2, 400, 1);
    };
    check(!find_tokenizer({}, loader(5)) && !find_tokenizer("", loader(5)));
    refused("missing rank file", {"none.model", "No such file"},
            [&] { find_tokenizer("none.model", loader(0)); });
    const std::string model = put("data/tokenizer.model", rank_file(300));
    check(find_tokenizer({}, loader(0))->path == model, "tokenizer.model");
    const std::string tiktoken = put("data/tokenizer.tiktoken", rank_file(300));
    check(find_tokenizer({}, loader(hash_file(model)))->path == tiktoken);
    std::filesystem::remove(tiktoken);
    const std::string vocabulary = put("data/tokenizer.vocab", vocabulary_file({"a", "b"}));
    check(find_tokenizer({}, loader(uint64_t{6} << 32 | 5))->path == vocabulary, "tokenizer.vocab");
    put("data/tokenizer.tiktoken", rank_file(300));
    refused("another tokenizer", {tiktoken, "data/b.bin", "0000000000000005"},
            [&] { find_tokenizer({}, loader(5)); });
}

// Of a packed file: what does not count is neither predicted nor replaced.
TEST(check_masks_of_packed_tokens) {
    const Masking masking{1.0, 4, std::vector<bool>(50), 7};
    std::vector<int32_t> tokens(64), targets(64);
    for (int32_t t = 0; t < 64; t++) tokens[t] = 5 + t % 45, targets[t] = t % 2 ? ignore_index : tokens[t];
    const std::vector<int32_t> before = tokens;
    masking.apply(0, 64, tokens.data(), targets.data());
    for (int32_t t = 0; t < 64; t++)
        check(t % 2 ? targets[t] == ignore_index && tokens[t] == before[t] : targets[t] == before[t]);
    check(std::ranges::count(tokens, 4) > 10);
}

}  // namespace
}  // namespace data_checks
