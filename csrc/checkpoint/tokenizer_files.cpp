#include "checkpoint/tokenizer_files.h"

#include <unistd.h>

#include <algorithm>

#include "core/file.h"
#include "core/json.h"
#include "platform/error.h"

namespace llamac {
namespace {

constexpr const char* template_file = "chat_template.jinja";
constexpr const char* generation_file = "generation_config.json";
constexpr const char* tokenizer_files[] = {"tokenizer.json",    "tokenizer_config.json",
                                           "tokenizer.model",   "special_tokens_map.json",
                                           "added_tokens.json", "vocab.json",
                                           "merges.txt",        template_file,
                                           "chat_template.json"};

// The tokenizer's files come first.
std::vector<TokenizerFile> files_in(const std::string& directory) {
    std::vector<TokenizerFile> files;
    const auto add = [&](const char* name, const char* role) {
        const std::string path = directory + "/" + name;
        if (access(path.c_str(), F_OK) == 0) files.push_back({name, role, read_file(path)});
    };
    for (const char* name : tokenizer_files) add(name, "tokenizer");
    add(generation_file, "generation");
    return files;
}

}  // namespace

std::vector<TokenizerFile> read_tokenizer_files(const std::string& model, const std::string& data_folder,
                                                bool packed) {
    std::vector<TokenizerFile> files = files_in(model);
    const bool has_tokenizer = !files.empty() && files[0].role == "tokenizer";
    if (data_folder.empty() || (has_tokenizer && !packed)) return files;
    for (TokenizerFile& own : files_in(data_folder)) {
        std::erase_if(files, [&](const TokenizerFile& file) { return file.name == own.name; });
        files.push_back(std::move(own));
    }
    return files;
}

bool has_chat_template(const std::vector<TokenizerFile>& files) {
    return std::any_of(files.begin(), files.end(), [](const TokenizerFile& file) {
        return file.name == template_file || (file.name == "tokenizer_config.json" &&
                                              file.text.find("\"chat_template\"") != file.text.npos);
    });
}

}  // namespace llamac
