// Folders: functions of std::filesystem that throw Error with the path and the system's reason, a folder that is held open,
// and a folder that is either complete or absent.
#pragma once
#include <memory>
#include <string>
#include <vector>

namespace llamac {

// Whether an entry of a folder can have this name: not a path, and not too long.
bool is_file_name(const std::string& name);
bool exists(const std::string& path);
bool is_folder(const std::string& path);
// Whether both paths lead to the same existing file or folder.
bool same_file(const std::string& a, const std::string& b);
// Names of the folder's entries, sorted.
std::vector<std::string> names_in(const std::string& folder);
// Creates a folder and its parents; an existing folder stays.
void create_folder(const std::string& path);

// A folder that stays open. Changes go to this folder, even after it was moved, removed or replaced at its path. Names are
// entries of the folder; no call follows a link at a name.
struct OpenFolder {
    const std::string path;
    const int fd;

    explicit OpenFolder(const std::string& path);
    OpenFolder(const OpenFolder& parent, const std::string& name);  // the parent must outlive it
    OpenFolder(const OpenFolder&) = delete;
    OpenFolder& operator=(const OpenFolder&) = delete;
    ~OpenFolder();

    // Throws Error if its path or its parent's no longer leads to it. An open folder keeps its inode number, so a folder that
    // was removed and made again is another one.
    void check() const;
    // Throws the error of a failed call on the entry, by errno, or that of check() if the folder is gone.
    [[noreturn]] void fail_on(const std::string& name, const char* action) const;
    // Whether there is an entry of this name, dangling links included.
    bool has(const std::string& name) const;
    // All names, sorted.
    std::vector<std::string> names() const;
    // Removes a file, a link (not its target), or a folder with its content. A missing entry is no error.
    void remove(const std::string& name) const;

  private:
    const OpenFolder* const parent;  // null: opened by its path
};

// Creates PARENT/.NAME.tmp for files that their writers sync (FileWriter); finish() renames it to PARENT/NAME, which must not
// exist, and syncs the parent. Without finish(), as after an error, the folder is removed. A killed process leaves it:
// names that end with `temporary_suffix` can be removed. One writer per name at a time (checkpoint/output.h).
struct FolderWriter {
    static constexpr const char* temporary_suffix = ".tmp";

    FolderWriter(const OpenFolder& parent, const std::string& name);
    FolderWriter(const FolderWriter&) = delete;
    FolderWriter& operator=(const FolderWriter&) = delete;
    ~FolderWriter();

    const OpenFolder& folder() const { return *open; }
    void finish();

  private:
    const OpenFolder& parent;
    const std::string name, temporary;
    std::unique_ptr<OpenFolder> open;
    bool finished = false;
};

}  // namespace llamac
