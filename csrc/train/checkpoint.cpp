#include "train/checkpoint.h"

#include <algorithm>
#include <cstdio>

#include "core/file.h"
#include "core/folder.h"
#include "platform/error.h"

namespace llamac {
namespace {

constexpr const char* removed_suffix = ".removed";

std::string step_name(int64_t step) {
    char name[40];
    std::snprintf(name, sizeof name, "step_%06lld", static_cast<long long>(step));
    return name;
}

bool ends_with(const std::string& name, const std::string& end) {
    return name.size() > end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
}

void prune(const std::string& out, int64_t keep) {
    auto found = checkpoints_in(out);
    for (; static_cast<int64_t>(found.size()) > keep; found.erase(found.begin())) {
        const std::string name = found.begin()->second, removed = out + "/." + name + removed_suffix;
        rename_durably(out + "/" + name, removed);
        remove_folder(removed);
    }
}

}  // namespace

std::optional<int64_t> step_of(const std::string& name) {
    if (name.size() < 11 || name.size() > 23 || name.rfind("step_", 0) != 0) return {};
    if (!std::all_of(name.begin() + 5, name.end(), [](char c) { return c >= '0' && c <= '9'; })) return {};
    const int64_t step = std::stoll(name.substr(5));
    if (step_name(step) != name) return {};
    return step;
}

std::map<int64_t, std::string> checkpoints_in(const std::string& out) {
    std::map<int64_t, std::string> found;
    for (const std::string& name : names_in(out))
        if (const auto step = step_of(name)) found[*step] = name;
    return found;
}

void remove_leftovers(const std::string& out) {
    for (const std::string& name : names_in(out))
        if (name.rfind(".step_", 0) == 0 &&
            (ends_with(name, FolderWriter::temporary_suffix) || ends_with(name, removed_suffix)))
            remove_folder(out + "/" + name);
}

std::vector<CheckpointFile> checkpoint_files(const std::string& config_json,
                                             const std::vector<NamedTensor>& weights,
                                             const std::vector<NamedTensor>& optimizer,
                                             const std::function<void()>& progress) {
    return {
        {"config.json", "config", [=](const std::string& path) { return write_file(path, config_json); }},
        {"model.safetensors", "weights",
         [=](const std::string& path) {
             return write_safetensors(path, weights, {{"format", "pt"}}, progress);
         }},
        {"optimizer.safetensors", "optimizer",
         [=](const std::string& path) {
             return write_safetensors(path, optimizer, {{"format", "pt"}}, progress);
         }},
    };
}

void write_checkpoint_to(const std::string& directory, Manifest manifest,
                         const std::vector<CheckpointFile>& files) {
    FolderWriter folder(directory);
    for (const CheckpointFile& file : files) {
        const std::string path = folder.path(file.name);
        const uint64_t xxh3 = file.write(path);
        manifest.files.push_back({file.name, InputFile(path).size, xxh3, file.role, std::nullopt});
    }
    write_file(folder.path("manifest.json"), manifest_text(manifest));
    folder.finish();
}

std::string write_checkpoint(const std::string& out, int64_t keep, Manifest manifest,
                             const std::vector<CheckpointFile>& files) {
    CHECK(keep >= 1);
    remove_leftovers(out);
    const std::string directory = out + "/" + step_name(manifest.step);
    write_checkpoint_to(directory, std::move(manifest), files);
    prune(out, keep);
    return directory;
}

Manifest open_checkpoint(const std::string& directory) {
    const std::string where = directory + "/manifest.json";
    if (!is_folder(directory))
        fail(directory, ": expected a checkpoint's directory, found ",
             exists(directory) ? "something else" : "nothing");
    if (!exists(where)) fail(directory, ": expected a checkpoint, found a directory without manifest.json");
    const Manifest manifest = parse_manifest(read_file(where), where);
    for (const FileRecord& record : manifest.files) {
        const std::string path = directory + "/" + record.name;
        const int64_t bytes = InputFile(path).size;
        if (bytes != record.bytes) fail(path, ": expected ", record.bytes, " bytes, found ", bytes);
        const uint64_t xxh3 = hash_file(path);
        if (xxh3 != record.xxh3)
            fail(path, ": expected the XXH3 checksum ", hex(record.xxh3), ", found ", hex(xxh3));
    }
    return manifest;
}

}  // namespace llamac
