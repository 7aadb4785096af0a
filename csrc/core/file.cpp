#include "core/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "core/folder.h"
#include "core/words.h"

namespace llamac {
namespace {

// Bytes that are read or written at once: the cache holds them, for the hash.
constexpr int64_t piece = 1 << 20;

void sync_folder(const OpenFolder& folder) {
    // Some network file systems cannot sync a folder and say EINVAL: there is nothing better to do there.
    if (uninterrupted([&] { return fsync(folder.fd); }) != 0 && errno != EINVAL)
        fail_with_errno(folder.path, "sync");
}

std::string without_slashes_at_its_end(std::string path) {
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    return path;
}

}  // namespace

void fail_with_errno(const std::string& path, const char* action) {
    const int reason = errno;
    throw SystemError(path + ": cannot " + action + ": " + std::strerror(reason), reason);
}

Descriptor::~Descriptor() {
    if (fd >= 0) close(fd);
}

InputFile::InputFile(const std::string& file_path) : path(file_path) {
    if (path.find('\0') != path.npos) fail(path, ": expected a path, which has no NUL");
    // O_NONBLOCK: opening a pipe returns, to be refused below. It means nothing for a regular file.
    descriptor.fd = uninterrupted([&] { return open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); });
    if (descriptor.fd < 0) fail_with_errno(path, "open");
    struct stat status;
    if (fstat(descriptor.fd, &status) != 0) fail_with_errno(path, "read");
    if (!S_ISREG(status.st_mode))
        fail(path, ": expected a file, found ", S_ISDIR(status.st_mode) ? "a folder" : "a device");
    size = status.st_size;
}

void InputFile::read(int64_t first, void* to, int64_t bytes) const {
    CHECK(first >= 0 && bytes >= 0 && first <= size - bytes);
    std::exception_ptr error;
#pragma omp parallel for if (bytes >= 4 * piece)
    for (int64_t begin = 0; begin < bytes; begin += piece) {
        try {
            read_slice(first + begin, static_cast<char*>(to) + begin, std::min(piece, bytes - begin));
        } catch (...) {
#pragma omp critical
            error = std::current_exception();
        }
    }
    if (error) std::rethrow_exception(error);
}

void InputFile::read_slice(int64_t first, char* at, int64_t bytes) const {
    while (bytes > 0) {
        // Linux reads 2 GiB in one call at most.
        const ssize_t done =
            uninterrupted([&] { return pread(descriptor.fd, at, static_cast<size_t>(bytes), first); });
        if (done < 0) fail_with_errno(path, "read");
        if (done == 0) {
            struct stat now{};
            if (fstat(descriptor.fd, &now) != 0) fail_with_errno(path, "read");
            fail(path, ": expected ", size, " bytes, as when it was opened, found ", now.st_size,
                 ": something has cut the file while it was in use");
        }
        at += done;
        first += done;
        bytes -= done;
    }
}

std::string read_file(const std::string& path, int64_t max_bytes) {
    const InputFile file(path);
    if (file.size > max_bytes) fail(path, ": expected at most ", max_bytes, " bytes, found ", file.size);
    std::string text(static_cast<size_t>(file.size), '\0');
    file.read(0, text.data(), file.size);
    return text;
}

// The name is random, so that two writers of one file each have their own; O_EXCL follows no link.
FileWriter::FileWriter(const OpenFolder& in, const std::string& called)
    : folder(in), name(called), path(in.path + "/" + called) {
    folder.check();
    std::random_device random;
    do {
        temporary = "." + name + "." + hex(uint64_t{random()} << 32 | random()) + ".tmp";
        descriptor.fd = uninterrupted([&] {
            return openat(folder.fd, temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                          0666);
        });
    } while (descriptor.fd < 0 && errno == EEXIST);
    if (descriptor.fd < 0) folder.fail_on(name, "write");
    hash = XXH3_createState();
    CHECK(hash != nullptr);
    XXH3_64bits_reset(hash);
}

FileWriter::~FileWriter() {
    XXH3_freeState(hash);
    if (!temporary.empty()) unlinkat(folder.fd, temporary.c_str(), 0);
}

void FileWriter::write(const void* data, int64_t bytes) {
    // More would be written only in finish(), at once: minutes without a sign of progress.
    constexpr int64_t max_unsynced = 256 << 20;
    const char* at = static_cast<const char*>(data);
    while (bytes > 0) {
        // In pieces that the cache holds, for the hash; Linux writes 2 GiB in one call at most.
        const ssize_t now = uninterrupted(
            [&] { return ::write(descriptor.fd, at, static_cast<size_t>(std::min(bytes, piece))); });
        if (now == 0) errno = ENOSPC;
        if (now <= 0) fail_with_errno(path, "write");
        XXH3_64bits_update(hash, at, static_cast<size_t>(now));
        at += now;
        bytes -= now;
        written += now;
        unsynced += now;
        if (unsynced >= max_unsynced) {
            if (uninterrupted([&] { return fdatasync(descriptor.fd); }) != 0) fail_with_errno(path, "write");
            unsynced = 0;
        }
        if (progress) progress();
    }
}

uint64_t FileWriter::finish() {
    if (uninterrupted([&] { return fsync(descriptor.fd); }) != 0) fail_with_errno(path, "write");
    if (progress) progress();
    // Interrupted, it is closed all the same.
    if (close(std::exchange(descriptor.fd, -1)) != 0 && errno != EINTR) fail_with_errno(path, "write");
    folder.check();
    rename_durably(folder, temporary, folder, name);
    temporary.clear();
    return XXH3_64bits_digest(hash);
}

uint64_t write_file(const OpenFolder& folder, const std::string& name, std::string_view text) {
    FileWriter writer(folder, name);
    writer.write(text.data(), static_cast<int64_t>(text.size()));
    return writer.finish();
}

uint64_t write_file(const std::string& path, std::string_view text) {
    return write_file(OpenFolder(parent_of(path)), name_of(path), text);
}

uint64_t hash_file(const std::string& path) {
    const InputFile file(path);
    XXH3_state_t* const hash = XXH3_createState();
    const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(hash, XXH3_freeState);
    CHECK(hash != nullptr);
    XXH3_64bits_reset(hash);
    constexpr int64_t part = 16 * piece;  // which all threads read
    std::vector<char> bytes(static_cast<size_t>(std::min(file.size, part)));
    for (int64_t first = 0; first < file.size; first += part) {
        const int64_t count = std::min(part, file.size - first);
        file.read(first, bytes.data(), count);
        XXH3_64bits_update(hash, bytes.data(), static_cast<size_t>(count));
    }
    return XXH3_64bits_digest(hash);
}

std::string hex(uint64_t hash) {
    return formatted("%016llx", static_cast<unsigned long long>(hash));
}

void rename_durably(const OpenFolder& from_folder, const std::string& from, const OpenFolder& to_folder,
                    const std::string& to) {
    if (renameat(from_folder.fd, from.c_str(), to_folder.fd, to.c_str()) != 0)
        from_folder.fail_on(from, ("rename to " + to_folder.path + "/" + to).c_str());
    sync_folder(to_folder);
    if (from_folder.fd != to_folder.fd) sync_folder(from_folder);
}

std::string parent_of(std::string path) {
    path = without_slashes_at_its_end(std::move(path));
    const size_t slash = path.find_last_of('/');
    return slash == path.npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

std::string name_of(std::string path) {
    path = without_slashes_at_its_end(std::move(path));
    return path.substr(path.find_last_of('/') + 1);
}

}  // namespace llamac
