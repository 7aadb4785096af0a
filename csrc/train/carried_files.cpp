#include "train/carried_files.h"

#include <unistd.h>

#include "core/file.h"

namespace llamac {
namespace {

constexpr const char* tokenizer_files[] = {"tokenizer.json",    "tokenizer_config.json",
                                           "tokenizer.model",   "special_tokens_map.json",
                                           "added_tokens.json", "vocab.json",
                                           "merges.txt",        "chat_template.jinja",
                                           "chat_template.json"};

void add_file(std::vector<CarriedFile>& files, const std::string& directory, const char* name,
              const char* role) {
    const std::string path = directory + "/" + name;
    if (access(path.c_str(), F_OK) == 0) files.push_back({name, role, read_file(path)});
}

std::vector<CarriedFile> tokenizer_files_in(const std::string& directory) {
    std::vector<CarriedFile> files;
    for (const char* name : tokenizer_files) add_file(files, directory, name, "tokenizer");
    return files;
}

}  // namespace

std::vector<CarriedFile> read_carried_files(const std::string& model, const std::string& rank_file) {
    std::vector<CarriedFile> files = tokenizer_files_in(model);
    const size_t slash = rank_file.find_last_of('/');
    if (files.empty() && !rank_file.empty())
        files = tokenizer_files_in(slash == rank_file.npos ? "." : rank_file.substr(0, slash));
    add_file(files, model, "generation_config.json", "generation");
    return files;
}

}  // namespace llamac
