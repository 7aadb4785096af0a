// Reading of files, and writing of files that are either complete or absent. Every function here throws Error with
// the file's path and the system's reason.
#pragma once
#include <cerrno>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "platform/error.h"

struct XXH3_state_s;

namespace llamac {

struct OpenFolder;

// An Error that the system gave the reason of: `code` is its errno.
struct SystemError : Error {
    int code;
    SystemError(const std::string& line, int reason) : Error(one_line(line)), code(reason) {}
};
// "PATH: cannot open: No such file or directory", by errno.
[[noreturn]] void fail_with_errno(const std::string& path, const char* action);

// What a call of the system returns that no signal has interrupted.
template <class Call>
auto uninterrupted(const Call& call) {
    auto result = call();
    while (result < 0 && errno == EINTR) result = call();
    return result;
}

// A regular file, open. It is not mapped: a mapping of a file that somebody truncates, or whose disk fails, ends the
// process by SIGBUS, where read() throws. Renaming a new file over it, as FileWriter does, is harmless.
struct InputFile {
    std::string path;
    int64_t size = 0;  // when it was opened

    explicit InputFile(const std::string& path);
    InputFile(InputFile&& other) noexcept;
    InputFile& operator=(InputFile&&) = delete;
    ~InputFile();

    // Bytes first .. first+bytes-1, all of them below `size`. Several threads may read.
    void read(int64_t first, void* to, int64_t bytes) const;

  private:
    int descriptor = -1;
};

// Writes .NAME.RANDOM.tmp, a new file of its own; finish() makes it durable and renames it to NAME. Without finish(),
// after an error for one, what was written is removed and a file that stood at NAME is untouched. A link at either name
// is not followed. A process that is killed leaves the temporary file behind.
struct FileWriter {
    FileWriter(const OpenFolder& folder, const std::string& name);  // the folder must outlive it
    explicit FileWriter(const std::string& path);
    FileWriter(const FileWriter&) = delete;
    FileWriter& operator=(const FileWriter&) = delete;
    ~FileWriter();

    // Where set, called after each piece that was written or made durable: a large file takes long.
    std::function<void()> progress;

    void write(const void* data, int64_t bytes);
    int64_t bytes() const { return written; }
    // Returns XXH3_64 of the bytes written.
    uint64_t finish();

  private:
    void create();

    const std::unique_ptr<const OpenFolder> parent;  // null: it is the caller's
    const OpenFolder& folder;
    const std::string name;
    std::string path, temporary;
    int descriptor = -1;
    int64_t written = 0, unsynced = 0;  // bytes; unsynced: since the last fdatasync
    XXH3_state_s* hash = nullptr;
};

// FileWriter for text at hand. Returns its XXH3_64.
uint64_t write_file(const std::string& path, std::string_view text);
uint64_t write_file(const OpenFolder& folder, const std::string& name, std::string_view text);

// A file's bytes; Error where it has more than `most`: it would fill the memory. And their XXH3_64.
std::string read_file(const std::string& path, int64_t most = int64_t{1} << 30);
uint64_t hash_file(const std::string& path);
// A hash as files and messages have it: 16 hexadecimal digits.
std::string hex(uint64_t hash);

// Renames an entry and syncs the folders: after a power failure it has one of the two names, and the new one once this
// has returned. What lies inside must be synced before (FileWriter does it).
void rename_durably(const OpenFolder& from_folder, const std::string& from, const OpenFolder& to_folder,
                    const std::string& to);

// "a/b/c" in two: "a/b" and "c". "c" lies in ".", "/c" in "/"; slashes at the end do not count.
std::string parent_of(std::string path);
std::string name_of(std::string path);

}  // namespace llamac
