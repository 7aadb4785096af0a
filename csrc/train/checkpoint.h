// Checkpoints: OUT/step_000100/ with config.json and model.safetensors (Hugging Face's names: transformers
// opens the directory as it is), optimizer.safetensors, and manifest.json, which says what the run was and
// what each file must be.
//
// A checkpoint is written under a temporary name, synced, and renamed last; it is renamed first when it is
// removed. So a directory called step_* is complete, whenever the program or the machine stops.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/safetensors.h"
#include "train/manifest.h"

namespace llamac {

// A file of a checkpoint that is to be written. role: as in FileRecord. write: makes it at the path and returns its
// XXH3_64.
struct CheckpointFile {
    std::string name, role;
    std::function<uint64_t(const std::string& path)> write;
};

// config.json, model.safetensors and optimizer.safetensors. The tensors must outlive the result. progress: called after
// each piece of theirs (FileWriter).
std::vector<CheckpointFile> checkpoint_files(const std::string& config_json,
                                             const std::vector<NamedTensor>& weights,
                                             const std::vector<NamedTensor>& optimizer,
                                             const std::function<void()>& progress = {});

// Writes out/step_000100 (it must not exist), then removes the oldest checkpoints beyond `keep` and what
// interrupted writes left behind. Throws Error, with all earlier checkpoints as they were. Returns the
// checkpoint's path.
std::string write_checkpoint(const std::string& out, int64_t keep, Manifest manifest,
                             const std::vector<CheckpointFile>& files);
// The same into a directory of any name, which must not exist, and nothing is removed.
void write_checkpoint_to(const std::string& directory, Manifest manifest,
                         const std::vector<CheckpointFile>& files);

// Reads the manifest and checks it and every file it names, bytes and checksum. Throws Error naming the file.
Manifest open_checkpoint(const std::string& directory);

// The step of a directory called step_000100; nothing for other names.
std::optional<int64_t> step_of(const std::string& name);
// step -> name, oldest first.
std::map<int64_t, std::string> checkpoints_in(const std::string& out);
// Removes what interrupted writes and removals left in `out`.
void remove_leftovers(const std::string& out);

}  // namespace llamac
