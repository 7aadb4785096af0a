// Checkpoints: OUT/step_000100/ with config.json and model.safetensors (Hugging Face's names: transformers
// opens the directory as it is), optimizer.safetensors, and manifest.json, which says what the run was and
// what each file must be.
//
// A checkpoint is written under a temporary name, synced, and renamed last; it is renamed first when it is
// removed. So a directory called step_* is complete, whenever the program or the machine stops.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/gemm.h"
#include "core/safetensors.h"
#include "train/carried_files.h"
#include "train/options.h"

namespace llamac {

struct FileRecord {
    int64_t bytes = 0;
    uint64_t xxh3 = 0;  // XXH3_64
};

struct Manifest {
    int64_t step = 0;           // updates done
    int64_t data_position = 0;  // sequences drawn since the start, over all devices: follows from the rest
    int64_t seed = 0, world_size = 1;
    int64_t seq_len = 0, batch_size = 0;
    int64_t sequences = 0;         // of the training data; 0: it had none of its own
    int64_t total_batch_size = 0;  // tokens an update, never 0
    std::string dtype, grad_dtype, optimizer_state, master_weights;  // as the flags have them
    std::map<std::string, std::string> kernels;                      // operation -> variant
    GemmChoices gemms;                                               // what computed the matrix products
    nlohmann::json config;                                           // the resolved options
    std::map<std::string, FileRecord> files;                         // by write_checkpoint
};

// The manifest of a run after `step` updates; sequences, kernels, gemms and files stay empty.
Manifest describe_run(const Options& options, int64_t world_size, int64_t step);

// Writes out/step_000100 (it must not exist), then removes the oldest checkpoints beyond `keep` and what
// interrupted writes left behind. Throws Error, with all earlier checkpoints as they were. Returns the
// checkpoint's path.
std::string write_checkpoint(const std::string& out, int64_t keep, Manifest manifest,
                             const std::string& config_json, const std::vector<NamedTensor>& weights,
                             const std::vector<NamedTensor>& optimizer,
                             const std::vector<CarriedFile>& carried = {});
// The same into a directory of any name, which must not exist, and nothing is removed.
void write_checkpoint_to(const std::string& directory, Manifest manifest, const std::string& config_json,
                         const std::vector<NamedTensor>& weights, const std::vector<NamedTensor>& optimizer,
                         const std::vector<CarriedFile>& carried = {});

// The directory that --resume means: none: ""; auto: the newest checkpoint in `out`, "" if there is none;
// else itself.
std::string checkpoint_to_resume(const std::string& out, const std::string& resume);

// Reads the manifest and checks it and every file it names, bytes and checksum. Throws Error naming the file.
Manifest open_checkpoint(const std::string& directory);

// Error where the options ask for what the checkpoint cannot go on with: another seed, sequence length,
// update, or another type of weights, master copy or moments, or fewer steps than are done.
void check_resume(const Manifest& manifest, const std::string& directory, const Options& options,
                  int64_t world_size = 1);

// "--lr was 0.002, is 0.003": what changes the updates and may change, but goes on with other values than the
// checkpoint's run had; "": nothing does. sequences: of the training data, 0: not known.
std::string changed_flags(const Manifest& manifest, const Options& options, int64_t sequences);

// Makes `out` ready for a run that goes on from `checkpoint` at `step`, or starts anew (""). Going on, the
// log is cut back to that step and newer checkpoints are set aside; anew, whatever an earlier run left is: in
// out/previous_1, _2, ... Returns the line that says so, or "". Call it after everything has been read: the
// model may lie in `out`.
std::string prepare_output(const std::string& out, const std::string& checkpoint, int64_t step);

}  // namespace llamac
