#include "core/folder.h"

#include <algorithm>
#include <filesystem>

#include "core/file.h"
#include "platform/error.h"

namespace llamac {
namespace {

namespace fs = std::filesystem;

// std::filesystem's errors as ours.
template <class F>
auto with_path(const std::string& path, F f) {
    try {
        return f();
    } catch (const fs::filesystem_error& error) {
        fail(path, ": ", error.code().message());
    }
}

}  // namespace

bool exists(const std::string& path) {
    return with_path(path, [&] { return fs::exists(path); });
}

bool is_folder(const std::string& path) {
    return with_path(path, [&] { return fs::is_directory(path); });
}

bool same_file(const std::string& a, const std::string& b) {
    return with_path(a, [&] { return fs::exists(a) && fs::exists(b) && fs::equivalent(a, b); });
}

std::vector<std::string> names_in(const std::string& folder) {
    return with_path(folder, [&] {
        std::vector<std::string> names;
        for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
        std::sort(names.begin(), names.end());
        return names;
    });
}

void create_folder(const std::string& path) {
    with_path(path, [&] { fs::create_directories(path); });
}

void remove_folder(const std::string& path) {
    with_path(path, [&] { fs::remove_all(path); });
}

FolderWriter::FolderWriter(const std::string& path) : target(path) {
    if (exists(path)) fail(path, ": expected no file or directory of this name yet, found one");
    const fs::path whole(path);
    temporary = whole.parent_path() / ("." + whole.filename().string() + temporary_suffix);
    remove_folder(temporary);
    with_path(temporary, [&] { fs::create_directory(temporary); });
}

FolderWriter::~FolderWriter() {
    std::error_code ignored;
    if (!finished) fs::remove_all(temporary, ignored);
}

void FolderWriter::finish() {
    rename_durably(temporary, target);
    finished = true;
}

}  // namespace llamac
