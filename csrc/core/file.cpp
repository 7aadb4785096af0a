#include "core/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "platform/error.h"

namespace llamac {
namespace {

// Closes on every way out of a function.
struct Descriptor {
    int fd;
    ~Descriptor() {
        if (fd >= 0) close(fd);
    }
};

[[noreturn]] void fail_with_errno(const std::string& path, const char* action) {
    const int reason = errno;
    fail(path, ": cannot ", action, ": ", std::strerror(reason));
}

void sync_parent(const std::string& path) {
    const size_t slash = path.find_last_of('/');
    const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
    const Descriptor d{open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
    if (d.fd < 0) fail_with_errno(folder, "open");
    // Some network file systems cannot sync a folder and say EINVAL: there is nothing better to do there.
    if (fsync(d.fd) != 0 && errno != EINVAL) fail_with_errno(folder, "sync");
}

}  // namespace

MappedFile::MappedFile(const std::string& file_path) : path(file_path) {
    if (path.find('\0') != path.npos) fail(path, ": expected a path, which has no NUL");
    // O_NONBLOCK: opening a pipe returns, to be refused below. It means nothing for a regular file.
    const Descriptor d{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    if (d.fd < 0) fail_with_errno(path, "open");
    struct stat status;
    if (fstat(d.fd, &status) != 0) fail_with_errno(path, "read");
    if (!S_ISREG(status.st_mode))
        fail(path, ": expected a file, found ", S_ISDIR(status.st_mode) ? "a folder" : "a device");
    size = status.st_size;
    if (size == 0) return;  // mmap refuses a length of 0
    void* mapped = mmap(nullptr, static_cast<size_t>(size), PROT_READ, MAP_PRIVATE, d.fd, 0);
    if (mapped == MAP_FAILED) fail_with_errno(path, "map");
    data = static_cast<const uint8_t*>(mapped);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path(std::move(other.path)),
      data(std::exchange(other.data, nullptr)),
      size(std::exchange(other.size, 0)) {}

MappedFile::~MappedFile() {
    if (data) munmap(const_cast<uint8_t*>(data), static_cast<size_t>(size));
}

FileWriter::FileWriter(const std::string& file_path) : path(file_path), temporary(file_path + ".tmp") {
    descriptor = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (descriptor < 0) fail_with_errno(path, "write");
    hash = XXH3_createState();
    CHECK(hash != nullptr);
    XXH3_64bits_reset(hash);
}

FileWriter::~FileWriter() {
    XXH3_freeState(hash);
    if (descriptor >= 0) close(descriptor);
    if (!temporary.empty()) unlink(temporary.c_str());
}

void FileWriter::write(const void* data, int64_t bytes) {
    const char* at = static_cast<const char*>(data);
    while (bytes > 0) {
        // In pieces that the cache holds, for the hash; Linux writes 2 GiB in one call at most.
        const ssize_t written =
            ::write(descriptor, at, static_cast<size_t>(std::min<int64_t>(bytes, 1 << 20)));
        if (written < 0 && errno == EINTR) continue;
        if (written == 0) errno = ENOSPC;
        if (written <= 0) fail_with_errno(path, "write");
        XXH3_64bits_update(hash, at, static_cast<size_t>(written));
        at += written;
        bytes -= written;
    }
}

uint64_t FileWriter::finish() {
    if (fsync(descriptor) != 0) fail_with_errno(path, "write");
    if (close(std::exchange(descriptor, -1)) != 0) fail_with_errno(path, "write");
    rename_durably(temporary, path);
    temporary.clear();
    return XXH3_64bits_digest(hash);
}

uint64_t write_file(const std::string& path, std::string_view text) {
    FileWriter writer(path);
    writer.write(text.data(), static_cast<int64_t>(text.size()));
    return writer.finish();
}

uint64_t hash_file(const std::string& path) {
    const MappedFile file(path);
    return XXH3_64bits(file.data, static_cast<size_t>(file.size));
}

std::string hex(uint64_t hash) {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
    return text;
}

void rename_durably(const std::string& from, const std::string& to) {
    if (rename(from.c_str(), to.c_str()) != 0) {
        const int reason = errno;
        fail(from, ": cannot rename to ", to, ": ", std::strerror(reason));
    }
    sync_parent(to);
}

}  // namespace llamac
