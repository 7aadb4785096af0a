// The output folder of a run, which has one owner at a time.
#pragma once
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/folder.h"

namespace llamac {

// The lock of an output folder, held until destruction or the end of the process.
struct FolderLock {
    static constexpr const char* name = ".lock";

    // Throws Error with host, process and start time of the owner if there is one.
    explicit FolderLock(const OpenFolder& folder);
    FolderLock(const FolderLock&) = delete;
    FolderLock& operator=(const FolderLock&) = delete;
    ~FolderLock();

    // Throws Error if the file of the lock is gone, so that a second run could start.
    void check() const;
    std::string warning;  // if the file system has no locks; else ""

  private:
    FolderLock(const OpenFolder& in, int descriptor) : folder(in), fd(descriptor) {}
    bool take();
    bool is_in_place() const;
    void write_owner() const;
    std::string read_owner() const;

    const OpenFolder& folder;
    int fd;
};

// The lock for a checkpoint written as `name`: needed if the name is a checkpoint's, or the folder that of a run; else null.
std::unique_ptr<FolderLock> lock_for_save(const OpenFolder& parent, const std::string& name);

// Only the owner writes into the folder.
struct OutputFolder {
    // Locks an existing folder; else prepare() creates and locks it, so that a refused run leaves nothing. To be called before
    // find_checkpoint(), as an owner may be writing a checkpoint. Other ranks than the owner call join() instead.
    explicit OutputFolder(const std::string& path, bool is_owner = true);

    // Opens the folder prepared by the owner. logged: the owner's logged_text().
    void join(const std::string& logged);
    std::string logged_text() const;

    // Prepares the folder for a run that resumes `checkpoint` at `step`, or starts anew (""). A resumed run cuts the log back
    // to that step and moves newer checkpoints to previous_1, _2, ...; a new one moves everything there. Damaged checkpoints
    // (names in this folder) become damaged_step_000100, damaged_step_000100_2, ... Only leftovers are deleted. Returns lines
    // for the console. To be called after everything was read, as the model may be in the folder.
    std::vector<std::string> prepare(const std::string& checkpoint, int64_t step,
                                     const std::vector<std::string>& damaged);
    // The names of the log's events of the step at which the run resumes in this folder.
    const std::set<std::string>& logged() const { return events; }
    // Throws Error if the path leads to another folder, or the lock is gone. To be called before writes by path.
    void check() const;
    // The folder, after check().
    const OpenFolder& folder() const;

  private:
    void open();

    const std::string path;
    std::optional<OpenFolder> opened;
    std::optional<FolderLock> lock;
    std::set<std::string> events;
};

}  // namespace llamac
