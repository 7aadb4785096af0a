// Reading of files, and writing of files that are either complete or absent. Every function here throws Error with
// the file's path and the system's reason.
#pragma once
#include <cerrno>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "platform/error.h"

struct XXH3_state_s;

namespace llamac {

struct OpenFolder;

// An Error from a failed system call; `code` is its errno.
struct SystemError : Error {
    int code;
    SystemError(const std::string& line, int reason) : Error(one_line(line)), code(reason) {}
};
// Throws "PATH: cannot open: No such file or directory", by errno.
[[noreturn]] void fail_with_errno(const std::string& path, const char* action);

// Repeats a system call while a signal interrupts it; returns its result.
template <class Call>
auto uninterrupted(const Call& call) {
    auto result = call();
    while (result < 0 && errno == EINTR) result = call();
    return result;
}

// An open file, closed with its owner; -1: there is none.
struct Descriptor {
    int fd = -1;

    Descriptor() = default;
    explicit Descriptor(int opened) : fd(opened) {}
    Descriptor(Descriptor&& other) noexcept : fd(std::exchange(other.fd, -1)) {}
    ~Descriptor();
};

// An open regular file. It is not mapped: if the file is truncated or the disk fails, a mapping ends the process by SIGBUS,
// while read() throws.
struct InputFile {
    std::string path;
    int64_t size = 0;  // when it was opened

    explicit InputFile(const std::string& path);

    // Bytes first .. first+bytes-1, all of them below `size`. Several threads may read; many bytes are read by all threads of
    // the host, because one cannot copy as fast from the cache of files.
    void read(int64_t first, void* to, int64_t bytes) const;

  private:
    void read_slice(int64_t first, char* to, int64_t bytes) const;

    Descriptor descriptor;
};

// Writes a new file .NAME.RANDOM.tmp; finish() syncs it and renames it to NAME. Without finish(), as after an error, the
// temporary file is removed and NAME is unchanged. Links at either name are not followed. A killed process leaves the
// temporary file.
struct FileWriter {
    FileWriter(const OpenFolder& folder, const std::string& name);  // the folder must outlive it
    FileWriter(const FileWriter&) = delete;
    FileWriter& operator=(const FileWriter&) = delete;
    ~FileWriter();

    // Called after each piece that is written or synced.
    std::function<void()> progress;

    void write(const void* data, int64_t bytes);
    int64_t bytes() const { return written; }
    // Returns XXH3_64 of the bytes written.
    uint64_t finish();

  private:
    const OpenFolder& folder;
    const std::string name, path;
    std::string temporary;
    Descriptor descriptor;
    int64_t written = 0, unsynced = 0;  // bytes; unsynced: since the last fdatasync
    XXH3_state_s* hash = nullptr;
};

// Writes a text by FileWriter. Returns its XXH3_64.
uint64_t write_file(const std::string& path, std::string_view text);
uint64_t write_file(const OpenFolder& folder, const std::string& name, std::string_view text);

// The bytes of a file; throws Error if there are more than `max_bytes`. And their XXH3_64.
std::string read_file(const std::string& path, int64_t max_bytes = int64_t{1} << 30);
uint64_t hash_file(const std::string& path);
// A hash as 16 hexadecimal digits.
std::string hex(uint64_t hash);

// Renames an entry and syncs the folders. After a power failure the entry has one of the two names; once this has returned,
// the new one. The content must be synced before (FileWriter syncs).
void rename_durably(const OpenFolder& from_folder, const std::string& from, const OpenFolder& to_folder,
                    const std::string& to);

// Split "a/b/c" into "a/b" and "c". The parent of "c" is ".", that of "/c" is "/"; trailing slashes are ignored.
std::string parent_of(std::string path);
std::string name_of(std::string path);

}  // namespace llamac
