#include "checkpoint/tokenizer_files.h"

#include <unistd.h>

#include <algorithm>

#include "core/file.h"
#include "core/json.h"
#include "platform/error.h"

namespace llamac {
namespace {

constexpr const char* tokenizer_files[] = {"tokenizer.json",    "tokenizer_config.json",
                                           "tokenizer.model",   "special_tokens_map.json",
                                           "added_tokens.json", "vocab.json",
                                           "merges.txt",        "chat_template.jinja",
                                           "chat_template.json"};

void add_file(std::vector<TokenizerFile>& files, const std::string& directory, const char* name,
              const char* role) {
    const std::string path = directory + "/" + name;
    if (access(path.c_str(), F_OK) == 0) files.push_back({name, role, read_file(path)});
}

std::vector<TokenizerFile> tokenizer_files_in(const std::string& directory) {
    std::vector<TokenizerFile> files;
    for (const char* name : tokenizer_files) add_file(files, directory, name, "tokenizer");
    return files;
}

constexpr const char* generation_file = "generation_config.json";

}  // namespace

std::vector<TokenizerFile> read_tokenizer_files(const std::string& model, const std::string& rank_file) {
    std::vector<TokenizerFile> files = tokenizer_files_in(model);
    const size_t slash = rank_file.find_last_of('/');
    const std::string beside = slash == rank_file.npos ? "." : rank_file.substr(0, slash);
    if (files.empty() && !rank_file.empty()) files = tokenizer_files_in(beside);
    const size_t before = files.size();
    if (!rank_file.empty()) add_file(files, beside, generation_file, "generation");
    if (files.size() == before) add_file(files, model, generation_file, "generation");
    return files;
}

void replace_tokenizer_file(std::vector<TokenizerFile>& files, const std::string& name,
                            const std::string& text) {
    const bool is_generation = name == generation_file;
    if (!is_generation &&
        std::find(std::begin(tokenizer_files), std::end(tokenizer_files), name) == std::end(tokenizer_files))
        fail("carry: expected ", generation_file, " or a file of the tokenizer, found ", quote(name));
    std::erase_if(files, [&](const TokenizerFile& file) { return file.name == name; });
    files.push_back({name, is_generation ? "generation" : "tokenizer", text});
}

}  // namespace llamac
