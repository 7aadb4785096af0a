// Checkpoints: OUT/step_000100/ with config.json and model.safetensors (with Hugging Face's names, so that
// transformers opens the directory), optimizer.safetensors, and manifest.json, which describes the run and lists the
// files.
//
// A checkpoint is written under a temporary name, synced, and renamed last; to remove one, it is renamed first. So a
// directory called step_* is always complete.
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
    // Called in place of write() after an error: takes part in the collective work of the other ranks.
    std::function<void()> only_take_part = {};
};
CheckpointFile text_file(const std::string& name, const std::string& role, const std::string& text);

// The name of a rank's file: model.safetensors, or with several ranks model-00001-of-00008.safetensors.
std::string shard_name(const std::string& stem, const Ranks& ranks, int64_t rank);

// The name of a checkpoint's directory: step_000042.
std::string step_name(int64_t step);

// Writes out/step_000100 (it must not exist), then removes the oldest checkpoints beyond `keep` and leftovers; for the owner
// of the folder (checkpoint/output.h). Throws Error; earlier checkpoints are unchanged. progress: as in FileWriter. Returns
// the path. All ranks call it, each with its own files; the first one writes the manifest and renames the directory.
std::string write_checkpoint(const OpenFolder& out, int64_t keep, Manifest manifest,
                             const std::vector<CheckpointFile>& files,
                             const std::function<void()>& progress = {}, const Ranks& ranks = one_rank);
// The same as parent/name, which must not exist, and nothing is removed.
void write_checkpoint_to(const OpenFolder& parent, const std::string& name, Manifest manifest,
                         const std::vector<CheckpointFile>& files, const std::function<void()>& progress = {},
                         const Ranks& ranks = one_rank);

// A file of a checkpoint is missing or has other bytes. Unreadable files (SystemError) and checkpoints of other versions are
// another Error.
struct DamagedCheckpoint : Error {
    using Error::Error;
};
// Checks the manifest and the bytes and checksum of every file. Throws Error naming the file. Ranks share the files, and all
// throw the same error.
Manifest open_checkpoint(const std::string& directory, const Ranks& ranks = one_rank);

// The step of a directory called step_000100; nothing for other names.
std::optional<int64_t> step_of(const std::string& name);
// step -> name, oldest first. The name alone decides: a link to a folder elsewhere is a checkpoint, too.
std::map<int64_t, std::string> checkpoints_in(const std::string& out);
// Removes leftovers of interrupted writes whose names begin so; for the owner of the folder.
void remove_leftovers(const OpenFolder& out,
                      const std::vector<std::string>& of = {"step_", "config.toml.", "log.jsonl.",
                                                            "profile.json.", "trace.json."});

}  // namespace llamac
