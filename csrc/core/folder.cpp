#include "core/folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <filesystem>
#include <memory>

#include "core/file.h"

namespace llamac {
namespace {

namespace fs = std::filesystem;

constexpr int folder_flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;

// std::filesystem's errors as ours.
template <class F>
auto with_path(const std::string& path, F f) {
    try {
        return f();
    } catch (const fs::filesystem_error& error) {
        throw SystemError(path + ": " + error.code().message(), error.code().value());
    }
}

int open_folder(int at, const std::string& name, const std::string& path) {
    const int fd = openat(at, name.c_str(), folder_flags);
    if (fd < 0) fail_with_errno(path, "open");
    return fd;
}

int open_in(const OpenFolder& parent, const std::string& name) {
    const int fd = openat(parent.fd, name.c_str(), folder_flags | O_NOFOLLOW);
    if (fd < 0) parent.fail_on(name, "open");
    return fd;
}

struct CloseListing {
    void operator()(DIR* listing) const { closedir(listing); }
};

}  // namespace

bool is_file_name(const std::string& name) {
    return name.size() <= NAME_MAX && name.find('/') == name.npos;
}

bool exists(const std::string& path) {
    std::error_code error;
    if (fs::exists(path, error)) return true;
    if (error == std::errc::filename_too_long) return false;  // no file has such a name
    return with_path(path, [&] { return fs::exists(path); });
}

bool is_folder(const std::string& path) {
    return with_path(path, [&] { return fs::is_directory(path); });
}

bool same_file(const std::string& a, const std::string& b) {
    return with_path(a, [&] { return fs::exists(a) && fs::exists(b) && fs::equivalent(a, b); });
}

std::vector<std::string> names_in(const std::string& folder) {
    return OpenFolder(folder).names();
}

void create_folder(const std::string& path) {
    with_path(path, [&] { fs::create_directories(path); });
}

OpenFolder::OpenFolder(const std::string& folder)
    : path(folder), fd(open_folder(AT_FDCWD, folder, folder)), parent(nullptr) {}

OpenFolder::OpenFolder(const OpenFolder& in, const std::string& name)
    : path(in.path + "/" + name), fd(open_in(in, name)), parent(&in) {}

OpenFolder::~OpenFolder() {
    close(fd);
}

void OpenFolder::check() const {
    struct stat own, there;
    const bool gone = stat(path.c_str(), &there) != 0;
    if (gone && errno != ENOENT && errno != ENOTDIR) fail_with_errno(path, "read");
    if (fstat(fd, &own) != 0) fail_with_errno(path, "read");
    if (parent) parent->check();  // second: where a parent went meanwhile, the error names the parent
    if (gone || own.st_dev != there.st_dev || own.st_ino != there.st_ino)
        fail(path, ": expected the folder that is being written to, found ", gone ? "none" : "another one",
             " at this path: it was moved, removed or replaced; nothing more is written");
}

void OpenFolder::fail_on(const std::string& name, const char* action) const {
    const int reason = errno;
    check();
    errno = reason;
    fail_with_errno(path + "/" + name, action);
}

bool OpenFolder::has(const std::string& name) const {
    struct stat status;
    if (fstatat(fd, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0) return true;
    if (errno != ENOENT) fail_on(name, "read");
    return false;
}

std::vector<std::string> OpenFolder::names() const {
    const int listed = open_folder(fd, ".", path);
    const std::unique_ptr<DIR, CloseListing> listing(fdopendir(listed));
    if (!listing) {
        close(listed);
        fail_with_errno(path, "read");
    }
    std::vector<std::string> names;
    for (;;) {
        errno = 0;
        const dirent* const entry = readdir(listing.get());
        if (!entry && errno != 0) fail_with_errno(path, "read");
        if (!entry) break;
        const std::string name = entry->d_name;
        if (name != "." && name != "..") names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
}

void OpenFolder::remove(const std::string& name) const {
    if (unlinkat(fd, name.c_str(), 0) == 0 || errno == ENOENT) return;
    if (errno != EISDIR) fail_on(name, "remove");
    {
        const OpenFolder inner(*this, name);
        for (const std::string& each : inner.names()) inner.remove(each);
    }
    if (unlinkat(fd, name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT) fail_on(name, "remove");
}

FolderWriter::FolderWriter(const OpenFolder& in, const std::string& called)
    : parent(in), name(called), temporary("." + called + temporary_suffix) {
    const std::string path = parent.path + "/" + name;
    parent.check();
    if (parent.has(name)) fail(path, ": expected no file or directory of this name yet, found one");
    parent.remove(temporary);
    if (mkdirat(parent.fd, temporary.c_str(), 0777) != 0) parent.fail_on(name, "write");
    open = std::make_unique<OpenFolder>(parent, temporary);
}

FolderWriter::~FolderWriter() {
    if (finished) return;
    try {
        parent.remove(temporary);
    } catch (const Error&) {  // the error that led here is the one to be told; the next writer removes it
    }
}

void FolderWriter::finish() {
    open->check();
    rename_durably(parent, temporary, parent, name);
    finished = true;
}

}  // namespace llamac
