// The output folder of a run: it has one owner at a time, may not be replaced during the run, and is prepared for the
// run.
#pragma once
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/folder.h"

namespace llamac {

// The lock of a folder that a run writes into, held until destruction or the death of the process, however it dies.
struct FolderLock {
    static constexpr const char* name = ".lock";

    // Throws Error naming host, process and start time of the owner where there is one.
    explicit FolderLock(const OpenFolder& folder);
    FolderLock(const FolderLock&) = delete;
    FolderLock& operator=(const FolderLock&) = delete;
    ~FolderLock();

    // Throws Error where the file of the lock is no longer there: a second run could start.
    void check() const;
    std::string warning;  // where the file system has no locks; else ""

  private:
    FolderLock(const OpenFolder& in, int descriptor) : folder(in), fd(descriptor) {}
    bool take();
    bool is_in_place() const;
    void write_owner() const;
    std::string read_owner() const;

    const OpenFolder& folder;
    int fd;
};

// The lock, for a checkpoint that is written as `name` beside others: where the name is a checkpoint's, or a run has
// been in this folder. Null for the folders of other files, into which no run writes.
std::unique_ptr<FolderLock> lock_for_save(const OpenFolder& parent, const std::string& name);

// For the whole of a run. Only its owner writes into the folder, moves things aside and removes leftovers.
struct OutputFolder {
    // Locks the folder, if it exists; else prepare() makes and locks it, so that a run that is refused leaves nothing.
    // Before the checkpoint to resume is looked for: the owner may be writing it. Does nothing for the ranks of a run
    // that do not own the folder, which join() it.
    explicit OutputFolder(const std::string& path, bool is_owner = true);

    // Opens the folder that the owner has prepared. logged: the owner's logged_text().
    void join(const std::string& logged);
    std::string logged_text() const;

    // Makes the folder ready for a run that goes on from `checkpoint` at `step`, or starts anew (""). Going on, the log
    // is cut back to that step and newer checkpoints are set aside; anew, whatever an earlier run left is: in
    // previous_1, _2, ... Damaged checkpoints (names in this folder) get the name damaged_step_000100, or, if there is
    // one, damaged_step_000100_2, ... Nothing is deleted but leftovers. Returns the lines that say so. Call it after
    // everything has been read: the model may lie in the folder.
    std::vector<std::string> prepare(const std::string& checkpoint, int64_t step,
                                     const std::vector<std::string>& damaged);
    // The names of the log's events of that step, where the run goes on in this folder.
    const std::set<std::string>& logged() const { return events; }
    // Throws Error where the path leads to another folder by now, or the lock is gone. For what is written by path.
    void check() const;
    // The folder, checked, to write into: what is written through it cannot go astray.
    const OpenFolder& folder() const;

  private:
    void open();

    const std::string path;
    std::optional<OpenFolder> opened;
    std::optional<FolderLock> lock;
    std::set<std::string> events;
};

}  // namespace llamac
