// Files that are read, and files that are either written whole or not at all.
// Every function here throws Error with the file's path and the system's reason.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

struct XXH3_state_s;

namespace llamac {

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

// A file's bytes.
std::string read_file(const std::string& path);

// Writes path + ".tmp"; finish() makes it durable and renames it to path. Without finish(), after an error
// for one, what was written is removed and a file that stood at path is untouched. progress: called after each piece
// that was written or made durable; a large file takes long.
struct FileWriter {
    explicit FileWriter(const std::string& path, std::function<void()> progress = {});
    FileWriter(const FileWriter&) = delete;
    FileWriter& operator=(const FileWriter&) = delete;
    ~FileWriter();

    void write(const void* data, int64_t bytes);
    // Returns XXH3_64 of the bytes written.
    uint64_t finish();

  private:
    std::string path, temporary;
    std::function<void()> progress;
    int descriptor = -1;
    int64_t unsynced = 0;  // bytes since the last fdatasync
    XXH3_state_s* hash = nullptr;
};

// FileWriter for text at hand. Returns its XXH3_64.
uint64_t write_file(const std::string& path, std::string_view text);

// XXH3_64 of a file's bytes.
uint64_t hash_file(const std::string& path);
// A hash as files and messages have it: 16 hexadecimal digits.
std::string hex(uint64_t hash);

// Renames a file or folder and syncs the folder it lies in: after a power failure it has one of the two
// names, and the new one once this has returned. What lies inside must be synced before (FileWriter does it).
void rename_durably(const std::string& from, const std::string& to);

}  // namespace llamac
