#include "core/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "core/folder.h"

namespace llamac {
namespace {

// Closes on every way out of a function.
struct Descriptor {
    int fd;
    ~Descriptor() {
        if (fd >= 0) close(fd);
    }
};

// Returns a descriptor of a regular file.
int open_file(const std::string& path) {
    // O_NONBLOCK: opening a pipe returns, to be refused below. It means nothing for a regular file.
    Descriptor d{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    if (d.fd < 0) fail_with_errno(path, "open");
    struct stat status;
    if (fstat(d.fd, &status) != 0) fail_with_errno(path, "read");
    if (!S_ISREG(status.st_mode))
        fail(path, ": expected a file, found ", S_ISDIR(status.st_mode) ? "a folder" : "a device");
    return std::exchange(d.fd, -1);
}

template <class F>
void read_pieces(const std::string& path, const F& take) {
    const Descriptor d{open_file(path)};
    std::vector<char> piece(1 << 20);
    for (;;) {
        const ssize_t bytes = read(d.fd, piece.data(), piece.size());
        if (bytes < 0 && errno == EINTR) continue;
        if (bytes < 0) fail_with_errno(path, "read");
        if (bytes == 0) return;
        take(std::string_view(piece.data(), static_cast<size_t>(bytes)));
    }
}

void sync_folder(const OpenFolder& folder) {
    // Some network file systems cannot sync a folder and say EINVAL: there is nothing better to do there.
    if (fsync(folder.fd) != 0 && errno != EINVAL) fail_with_errno(folder.path, "sync");
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

MappedFile::MappedFile(const std::string& file_path) : path(file_path) {
    const Descriptor d{open_file(path)};
    struct stat status;
    if (fstat(d.fd, &status) != 0) fail_with_errno(path, "read");
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

FileWriter::FileWriter(const OpenFolder& in, const std::string& called)
    : folder(in), name(called), path(in.path + "/" + called) {
    create();
}

FileWriter::FileWriter(const std::string& file_path)
    : parent(std::make_unique<OpenFolder>(parent_of(file_path))),
      folder(*parent),
      name(name_of(file_path)),
      path(file_path) {
    create();
}

// The name is random, so that two writers of one file each have their own; O_EXCL follows no link.
void FileWriter::create() {
    folder.check();
    std::random_device random;
    do {
        temporary = "." + name + "." + hex(uint64_t{random()} << 32 | random()) + ".tmp";
        descriptor =
            openat(folder.fd, temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    } while (descriptor < 0 && errno == EEXIST);
    if (descriptor < 0) fail_with_errno(path, "write");
    hash = XXH3_createState();
    CHECK(hash != nullptr);
    XXH3_64bits_reset(hash);
}

FileWriter::~FileWriter() {
    XXH3_freeState(hash);
    if (descriptor >= 0) close(descriptor);
    if (!temporary.empty()) unlinkat(folder.fd, temporary.c_str(), 0);
}

void FileWriter::write(const void* data, int64_t bytes) {
    const char* at = static_cast<const char*>(data);
    while (bytes > 0) {
        // In pieces that the cache holds, for the hash; Linux writes 2 GiB in one call at most.
        const ssize_t now = ::write(descriptor, at, static_cast<size_t>(std::min<int64_t>(bytes, 1 << 20)));
        if (now < 0 && errno == EINTR) continue;
        if (now == 0) errno = ENOSPC;
        if (now <= 0) fail_with_errno(path, "write");
        XXH3_64bits_update(hash, at, static_cast<size_t>(now));
        at += now;
        bytes -= now;
        written += now;
    }
}

uint64_t FileWriter::finish() {
    if (fsync(descriptor) != 0) fail_with_errno(path, "write");
    if (close(std::exchange(descriptor, -1)) != 0) fail_with_errno(path, "write");
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

std::string read_file(const std::string& path) {
    std::string text;
    read_pieces(path, [&](std::string_view piece) { text += piece; });
    return text;
}

uint64_t hash_file(const std::string& path) {
    const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> hash(XXH3_createState(),
                                                                               XXH3_freeState);
    CHECK(hash != nullptr);
    XXH3_64bits_reset(hash.get());
    read_pieces(path,
                [&](std::string_view piece) { XXH3_64bits_update(hash.get(), piece.data(), piece.size()); });
    return XXH3_64bits_digest(hash.get());
}

std::string hex(uint64_t hash) {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
    return text;
}

void rename_durably(const OpenFolder& from_folder, const std::string& from, const OpenFolder& to_folder,
                    const std::string& to) {
    if (renameat(from_folder.fd, from.c_str(), to_folder.fd, to.c_str()) != 0) {
        const int reason = errno;
        throw SystemError(from_folder.path + "/" + from + ": cannot rename to " + to_folder.path + "/" + to +
                              ": " + std::strerror(reason),
                          reason);
    }
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
