// Folders: std::filesystem with Error, which names the path and the system's reason, in place of its exceptions;
// and a folder that is either written whole or not at all.
#pragma once
#include <string>
#include <vector>

namespace llamac {

bool exists(const std::string& path);
bool is_folder(const std::string& path);
// Whether both exist and are the same file or folder, by whatever path.
bool same_file(const std::string& a, const std::string& b);
// Names of the folder's entries, sorted.
std::vector<std::string> names_in(const std::string& folder);
// With its parents; an existing folder is left as it is.
void create_folder(const std::string& path);
// With all that it contains. What is not there is no error.
void remove_folder(const std::string& path);

// Creates PARENT/.NAME.tmp; files are written to path(name), each of them made durable by its writer (FileWriter does
// it); finish() renames the folder to PARENT/NAME, which must not exist, and makes that durable. Without finish(),
// after an error for one, what was written is removed. A process that is killed leaves the temporary folder behind:
// names that end with `temporary_suffix` can be removed.
struct FolderWriter {
    static constexpr const char* temporary_suffix = ".tmp";

    explicit FolderWriter(const std::string& path);
    FolderWriter(const FolderWriter&) = delete;
    FolderWriter& operator=(const FolderWriter&) = delete;
    ~FolderWriter();

    std::string path(const std::string& name) const { return temporary + "/" + name; }
    void finish();

  private:
    std::string target, temporary;
    bool finished = false;
};

}  // namespace llamac
