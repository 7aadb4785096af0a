// Folders: std::filesystem with Error, which has the path and the system's reason, instead of its exceptions; a
// folder that is held open; and a folder that is either complete or absent.
#pragma once
#include <memory>
#include <string>
#include <vector>

namespace llamac {

// Whether an entry of a folder can have this name: it is no path, which might lead out of the folder, and not too long.
bool is_file_name(const std::string& name);
bool exists(const std::string& path);
bool is_folder(const std::string& path);
// Whether both exist and are the same file or folder, by whatever path.
bool same_file(const std::string& a, const std::string& b);
// Names of the folder's entries, sorted.
std::vector<std::string> names_in(const std::string& folder);
// With its parents; an existing folder is left as it is.
void create_folder(const std::string& path);

// A folder that stays open. What is changed through it changes in this folder and in no other, also after somebody has
// moved it, removed it or put another one at its path. A name is one of its entries, and the entry itself: no call
// follows a link at a name.
struct OpenFolder {
    const std::string path;
    const int fd;

    explicit OpenFolder(const std::string& path);
    OpenFolder(const OpenFolder& parent, const std::string& name);  // the parent must outlive it
    OpenFolder(const OpenFolder&) = delete;
    OpenFolder& operator=(const OpenFolder&) = delete;
    ~OpenFolder();

    // Throws Error where its path, or its parent's, leads to another folder by now, or to none. While it is open, no new
    // folder gets its inode number, so a removed folder that was made again counts as another one.
    void check() const;
    // Throws what a call on the entry has failed with, by errno; or, where the folder itself is gone, what check() throws.
    [[noreturn]] void fail_on(const std::string& name, const char* action) const;
    // Whether there is an entry of this name: a link that leads nowhere is one.
    bool has(const std::string& name) const;
    // All names, sorted.
    std::vector<std::string> names() const;
    // Removes a file, a link (not what it leads to), or a folder with all that it contains. What is not there is no
    // error.
    void remove(const std::string& name) const;

  private:
    const OpenFolder* const parent;  // null: opened by its path
};

// Creates PARENT/.NAME.tmp; files are written into folder(), each of them made durable by its writer (FileWriter does
// it); finish() renames the folder to PARENT/NAME, which must not exist, and makes that durable. Without finish(),
// after an error for one, what was written is removed. A process that is killed leaves the temporary folder behind:
// names that end with `temporary_suffix` can be removed. One writer of a name at a time: see checkpoint/output.h.
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
