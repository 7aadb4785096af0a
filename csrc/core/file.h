// Files that are read whole (mapped, read-only) and files that are either written whole or not at all.
// Every function here throws Error with the file's path and the system's reason.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

struct XXH3_state_s;

namespace llamac {

// A regular file's bytes, data[0 .. size). Reading them faults if somebody truncates the file meanwhile;
// renaming a new file over it, as FileWriter does, is harmless.
struct MappedFile {
    std::string path;
    const uint8_t* data = nullptr;
    int64_t size = 0;

    explicit MappedFile(const std::string& path);
    MappedFile(MappedFile&& other) noexcept;
    MappedFile& operator=(MappedFile&&) = delete;
    ~MappedFile();

    std::string_view text() const { return {reinterpret_cast<const char*>(data), static_cast<size_t>(size)}; }
};

// Writes path + ".tmp"; finish() makes it durable and renames it to path. Without finish(), after an error
// for one, what was written is removed and a file that stood at path is untouched.
struct FileWriter {
    explicit FileWriter(const std::string& path);
    FileWriter(const FileWriter&) = delete;
    FileWriter& operator=(const FileWriter&) = delete;
    ~FileWriter();

    void write(const void* data, int64_t bytes);
    // Returns XXH3_64 of the bytes written.
    uint64_t finish();

  private:
    std::string path, temporary;
    int descriptor = -1;
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
