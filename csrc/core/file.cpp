#include "core/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "platform/error.h"

namespace llamac {
namespace {

// Bytes that are read or written at once: the cache holds them, for the hash.
constexpr int64_t piece = 1 << 20;

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

InputFile::InputFile(const std::string& file_path) : path(file_path) {
    // O_NONBLOCK: opening a pipe returns, to be refused below. It means nothing for a regular file.
    Descriptor d{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    if (d.fd < 0) fail_with_errno(path, "open");
    struct stat status;
    if (fstat(d.fd, &status) != 0) fail_with_errno(path, "read");
    if (!S_ISREG(status.st_mode))
        fail(path, ": expected a file, found ", S_ISDIR(status.st_mode) ? "a folder" : "a device");
    size = status.st_size;
    descriptor = std::exchange(d.fd, -1);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path(std::move(other.path)),
      size(std::exchange(other.size, 0)),
      descriptor(std::exchange(other.descriptor, -1)) {}

InputFile::~InputFile() {
    if (descriptor >= 0) close(descriptor);
}

void InputFile::read(int64_t first, void* to, int64_t bytes) const {
    CHECK(first >= 0 && bytes >= 0 && first <= size - bytes);
    char* at = static_cast<char*>(to);
    while (bytes > 0) {
        // Linux reads 2 GiB in one call at most.
        const ssize_t done = pread(descriptor, at, static_cast<size_t>(bytes), first);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) fail_with_errno(path, "read");
        if (done == 0) {
            struct stat now{};
            if (fstat(descriptor, &now) != 0) fail_with_errno(path, "read");
            fail(path, ": expected ", size, " bytes, as when it was opened, found ", now.st_size,
                 ": something has cut the file while it was in use");
        }
        at += done;
        first += done;
        bytes -= done;
    }
}

std::string read_file(const std::string& path) {
    const InputFile file(path);
    std::string text(static_cast<size_t>(file.size), '\0');
    file.read(0, text.data(), file.size);
    return text;
}

FileWriter::FileWriter(const std::string& file_path, std::function<void()> on_progress)
    : path(file_path), temporary(file_path + ".tmp"), progress(std::move(on_progress)) {
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
    // More would be written only in finish(), at once: minutes without a sign of progress.
    constexpr int64_t most_unsynced = 256 << 20;
    const char* at = static_cast<const char*>(data);
    while (bytes > 0) {
        const ssize_t written = ::write(descriptor, at, static_cast<size_t>(std::min(bytes, piece)));
        if (written < 0 && errno == EINTR) continue;
        if (written == 0) errno = ENOSPC;
        if (written <= 0) fail_with_errno(path, "write");
        XXH3_64bits_update(hash, at, static_cast<size_t>(written));
        at += written;
        bytes -= written;
        unsynced += written;
        if (unsynced >= most_unsynced) {
            if (fdatasync(descriptor) != 0) fail_with_errno(path, "write");
            unsynced = 0;
        }
        if (progress) progress();
    }
}

uint64_t FileWriter::finish() {
    if (fsync(descriptor) != 0) fail_with_errno(path, "write");
    if (progress) progress();
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
    const InputFile file(path);
    XXH3_state_t* const hash = XXH3_createState();
    const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(hash, XXH3_freeState);
    CHECK(hash != nullptr);
    XXH3_64bits_reset(hash);
    std::vector<char> bytes(static_cast<size_t>(std::min(file.size, piece)));
    for (int64_t first = 0; first < file.size; first += piece) {
        const int64_t count = std::min(piece, file.size - first);
        file.read(first, bytes.data(), count);
        XXH3_64bits_update(hash, bytes.data(), static_cast<size_t>(count));
    }
    return XXH3_64bits_digest(hash);
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
