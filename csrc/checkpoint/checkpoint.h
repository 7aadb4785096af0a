// Checkpoints: OUT/step_000100/ with config.json and model.safetensors (with Hugging Face's names, so that
// transformers opens the directory), optimizer.safetensors, and manifest.json, which describes the run and lists the
// files.
//
// A checkpoint is written under a temporary name, synced, and renamed last. To remove it, it is renamed first. So a
// directory called step_* is always complete, even if the program or the machine stops at any moment.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "core/folder.h"
#include "core/safetensors.h"
#include "run/ranks.h"

namespace llamac {

// A file of a checkpoint that is to be written. role, rank: as in FileRecord. write: writes its bytes.
struct CheckpointFile {
    std::string name, role;
    std::optional<int64_t> rank;
    std::function<void(FileWriter& file)> write;
    // Where write() is not called because of an error before: takes part in what the other ranks do together for theirs.
    std::function<void()> only_take_part = {};
};
CheckpointFile text_file(const std::string& name, const std::string& role, const std::string& text);

// The name of a rank's file: model.safetensors, or with several ranks model-00001-of-00008.safetensors.
std::string shard_name(const std::string& stem, const Ranks& ranks, int64_t rank);

// The name of a checkpoint's directory: step_000042.
std::string step_name(int64_t step);

// Writes out/step_000100 (it must not exist), then removes the oldest checkpoints beyond `keep` and what
// interrupted writes of checkpoints left behind; for the run that owns the folder (checkpoint/output.h). Throws Error, with all earlier
// checkpoints as they were. progress: FileWriter's. Returns the checkpoint's path. With several ranks, all of them call it,
// each with its own files, which they write at the same time; the first one writes the manifest and renames the directory.
std::string write_checkpoint(const OpenFolder& out, int64_t keep, Manifest manifest,
                             const std::vector<CheckpointFile>& files,
                             const std::function<void()>& progress = {}, const Ranks& ranks = one_rank);
// The same as parent/name, which must not exist, and nothing is removed.
void write_checkpoint_to(const OpenFolder& parent, const std::string& name, Manifest manifest,
                         const std::vector<CheckpointFile>& files, const std::function<void()>& progress = {},
                         const Ranks& ranks = one_rank);

// A checkpoint that is not what was written: a file is missing or has other bytes. Where a file cannot be read
// (SystemError: permissions, a failing disk, too many open files), and where another version wrote it, nothing is said
// about the checkpoint, and the Error is not this one.
struct DamagedCheckpoint : Error {
    using Error::Error;
};
// Reads the manifest and checks it and every file it names, bytes and checksum. Throws Error naming the file. Ranks share
// the files: what one finds, all throw.
Manifest open_checkpoint(const std::string& directory, const Ranks& ranks = one_rank);

// The step of a directory called step_000100; nothing for other names.
std::optional<int64_t> step_of(const std::string& name);
// step -> name, oldest first. The name alone decides: a link to a folder elsewhere is a checkpoint, too.
std::map<int64_t, std::string> checkpoints_in(const std::string& out);
// Removes what interrupted writes and removals left in `out` of names that begin so; for the run that owns it.
void remove_leftovers(const OpenFolder& out, const std::vector<std::string>& of = {
                                                 "step_", "log.jsonl.", "profile.json.", "trace.json."});

}  // namespace llamac
