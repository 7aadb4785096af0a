#include "readers.h"

#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "checkpoint/config_json.h"
#include "checkpoint/manifest.h"
#include "checkpoint/truncate_log.h"
#include "core/file.h"
#include "core/json.h"
#include "core/library_gemm.h"
#include "core/safetensors.h"
#include "data/questions.h"
#include "data/tokenizer.h"
#include "data/tokens.h"
#include "data/vocabulary.h"
#include "model/config.h"
#include "run/options.h"
#include "run/toml.h"

namespace llamac {
namespace {

// A folder in memory, where there is one: nothing waits for a disk.
struct Scratch {
    std::string folder;

    Scratch() {
        const char* const root = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
        folder = std::string(root) + "/llamac_readers_XXXXXX";
        CHECK(mkdtemp(folder.data()) != nullptr);
    }
    Scratch(const Scratch&) = delete;
    ~Scratch() {
        std::error_code ignored;
        std::filesystem::remove_all(folder, ignored);
    }
};

const std::string& scratch() {
    static const Scratch only;
    return only.folder;
}

// A plain write: FileWriter's hash and syncs would be most of the time of a run.
std::string put(const std::string& name, std::string_view bytes) {
    const std::string path = scratch() + "/" + name;
    std::FILE* const file = std::fopen(path.c_str(), "wb");
    CHECK(file != nullptr && std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size());
    CHECK(std::fclose(file) == 0);
    return path;
}

void read_safetensors(std::string_view bytes) {
    const SafetensorsFile file(put("one.safetensors", bytes));
    int64_t size = 0;
    std::vector<float> values;
    std::vector<int32_t> integers;
    for (const SafetensorsFile::Entry& e : file.entries()) {
        CHECK(file.find(e.name) == &e);
        size += e.bytes;
        if (!e.other.empty()) continue;
        Tensor out;
        out.rank = static_cast<int>(e.shape.size());
        std::copy(e.shape.begin(), e.shape.end(), out.shape);
        int64_t stride = 1;
        for (int d = out.rank - 1; d >= 0; stride *= std::max<int64_t>(out.shape[d--], 1))
            out.stride[d] = stride;
        values.resize(static_cast<size_t>(out.elements()));
        integers.resize(values.size());
        const bool is_integer = info(e.dtype).is_integer();
        out.dtype = is_integer ? DType::i32 : DType::f32;
        out.data = is_integer ? static_cast<void*>(integers.data()) : values.data();
        file.read(e.name, out);
    }
    CHECK(size <= static_cast<int64_t>(bytes.size()));
}

// The index of a folder with two shards, "one.safetensors" of "a" and "two.safetensors" of "b".
void read_index(std::string_view bytes) {
    static const bool prepared = [] {
        std::filesystem::create_directory(scratch() + "/index");
        for (const auto& [shard, name] : {std::pair{"one", "a"}, {"two", "b"}}) {
            const std::string header =
                std::string("{\"") + name + R"(":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
            std::string file(8, '\0');
            file[0] = static_cast<char>(header.size());
            put(std::string("index/") + shard + ".safetensors", file + header + "1234");
        }
        return true;
    }();
    CHECK(prepared);
    put("index/model.safetensors.index.json", bytes);
    const WeightFiles weights(scratch() + "/index");
    for (const char* name : {"a", "b"})
        if (const auto* entry = weights.find(name)) CHECK(entry->bytes == 4);
}

void read_config(std::string_view bytes) {
    const Config config = load_config(put("config.json", bytes));
    const std::string text = config_json(config, DType::f32);
    CHECK(config_json(load_config(put("config.json", text)), DType::f32) == text);
}

Options parse(const std::vector<std::string>& arguments) {
    std::vector<const char*> argv = {"train_llama3"};
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    return parse_options(static_cast<int>(argv.size()), argv.data());
}

// What --print-config writes is read back to the same.
void check_written(const Options& options) {
    const std::string text = to_toml(options);
    CHECK(to_toml(parse({"--config", put("written.toml", text)})) == text);
}

void read_toml(std::string_view bytes) {
    const std::string path = put("run.toml", bytes);
    llamac::read_toml(path);  // first by itself: most inputs end here, and the flags take ten times as long
    check_written(parse({"--config", path}));
}

// An argument per line. --help and --version end the program.
void read_flags(std::string_view bytes) {
    std::vector<std::string> arguments;
    while (!bytes.empty()) {
        const size_t end = std::min(bytes.find('\n'), bytes.size());
        const std::string argument(bytes.substr(0, std::min(end, bytes.find('\0'))));
        bytes.remove_prefix(std::min(end + 1, bytes.size()));
        const bool ends =
            argument.rfind("-h", 0) == 0 || argument.rfind("--h", 0) == 0 || argument.rfind("--v", 0) == 0;
        if (!ends) arguments.push_back(argument);
    }
    check_written(parse(arguments));
}

void read_tokens(std::string_view bytes) {
    constexpr int64_t length = 4, vocabulary = 300, batch = 2;
    const std::string path = put("tokens.bin", bytes);
    const Loader loader(path, length, vocabulary, batch);
    int32_t tokens[batch * length], targets[batch * length], first[batch * length] = {};
    for (int64_t step = 0; step * batch < std::min<int64_t>(loader.sequences, 64); step++) {
        loader.micro_batch(step, 0, 0, 1, tokens, targets, 0, first);
        for (const int32_t id : tokens) CHECK(0 <= id && id < vocabulary);
        for (const int32_t id : targets)
            CHECK((0 <= id && id < vocabulary) || (loader.is_packed && id == ignore_index));
        for (int64_t i = 0; i < batch * length; i++) CHECK(0 <= first[i] && first[i] <= i % length);
    }
}

// Bytes that begin with "+" stand for what is behind it after a rank for each byte, which every rank file has.
void read_tokenizer(std::string_view bytes) {
    std::string text(bytes);
    if (bytes.substr(0, 1) == "+") {
        constexpr const char* letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        text.clear();
        for (int byte = 0; byte < 256; byte++)
            text += {letters[byte >> 2], letters[byte << 4 & 63], '=', '='},
                text += " " + std::to_string(byte) + "\n";
        text += bytes.substr(1);
    }
    const Tokenizer tokenizer(put("tokenizer.tiktoken", text));
    CHECK(tokenizer.decode({-1, 0, tokenizer.begin_of_text, 1 << 30}).size() > 2);
}

// With the checksum of the bytes behind the header: no other text gets past that.
std::string summed(std::string_view bytes) {
    std::string text(bytes);
    if (text.size() >= 64) {
        const uint64_t checksum = XXH3_64bits(text.data() + 64, text.size() - 64);
        std::memcpy(text.data() + 32, &checksum, sizeof checksum);
    }
    return text;
}

void read_vocabulary(std::string_view bytes) {
    const std::string text = summed(bytes);
    const Vocabulary found = parse_vocabulary(text, "tokenizer.vocab");
    size_t size = 0;
    for (const std::string& token : found.tokens) size += token.size();
    CHECK(64 + 4 * found.tokens.size() + size == text.size());
    const Tokenizer tokenizer(put("tokenizer.vocab", text));
    CHECK(tokenizer.decode({-1, 1 << 30}) == "\xff\xff" && tokenizer.hash == found.hash);
}

void read_questions(std::string_view bytes) {
    const Questions found = parse_questions(summed(bytes), "piqa.questions");
    size_t choices = 0, ids = 0;
    for (const Question& each : found.questions) choices += static_cast<size_t>(each.count);
    for (const Choice& each : found.choices) ids += static_cast<size_t>(each.context + each.continuation);
    CHECK(found.task == "piqa" && choices == found.choices.size() && ids == found.ids.size());
    for (const int32_t id : found.ids) CHECK(0 <= id && id < found.vocab_size);
}

// With the checksum of what stands before it: no other text gets past that.
void read_manifest(std::string_view bytes) {
    std::string text(bytes);
    const size_t end = text.rfind(",\n");
    if (end != text.npos) {
        const std::string hash = hex(XXH3_64bits(text.data(), end));
        text = text.substr(0, end) + ",\n \"xxh3\": \"" + hash + "\"\n}\n";
    }
    const std::string once = manifest_text(parse_manifest(text, "manifest.json"));
    CHECK(manifest_text(parse_manifest(once, "manifest.json")) == once);
}

void read_log(std::string_view bytes) {
    const std::string path = put("log.jsonl", bytes);
    truncate_log(path, 3);
    const std::string once = read_file(path);
    truncate_log(path, 3);
    CHECK(read_file(path) == once);
}

void read_gemms(std::string_view bytes) {
    const std::string text = to_json(read_gemm_cache(put("gemm.json", bytes))).dump();
    CHECK(to_json(read_gemm_cache(put("gemm.json", text))).dump() == text);
}

constexpr Reader table[] = {
    {"safetensors", read_safetensors},
    {"index", read_index},
    {"config", read_config},
    {"toml", read_toml},
    {"flags", read_flags},
    {"tokens", read_tokens},
    {"tokenizer", read_tokenizer},
    {"vocabulary", read_vocabulary},
    {"questions", read_questions},
    {"manifest", read_manifest},
    {"log", read_log},
    {"gemms", read_gemms},
};

}  // namespace

std::span<const Reader> readers() {
    return table;
}

std::string refusal(const Reader& reader, std::string_view bytes) {
    try {
        reader.read(bytes);
        return "";
    } catch (const Error& error) {
        const std::string message = error.what();
        CHECK(!message.empty() && one_line(message) == message && message.size() < 5100);
        return message;
    }
}

}  // namespace llamac
