// Resuming from a checkpoint: which checkpoint, and with which options. output.h handles the other checkpoints.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "run/ranks.h"

namespace llamac {

// A checkpoint that cannot be resumed: its name in the output folder, and the line that says why.
struct DamagedName {
    std::string name, reason;
};
// What --resume means.
struct ResumePoint {
    std::string directory;             // "": the run starts at step 0
    std::optional<Manifest> manifest;  // of the directory, whose files are as it says
    std::vector<DamagedName> damaged;  // newer ones, newest first, that --resume auto passed over
};
// none: nothing; auto: the newest complete checkpoint in `out`, nothing if there is none at all; else the directory of
// this name. Every byte of it is read and verified, once. Throws Error where all that there are, or the directory, are
// damaged, and where one cannot be read.
// All ranks go on from the checkpoints that rank 0 sees, and share the reading.
ResumePoint find_checkpoint(const std::string& out, const std::optional<std::string>& resume, const Ranks& ranks = one_rank);

// Error where the options ask for what the checkpoint cannot go on with: another seed, sequence length,
// step, or another type of weights, master copy or moments, or fewer steps than are done.
void check_resume(const Manifest& manifest, const std::string& directory, const Options& options,
                  int64_t world_size = 1);

// "--lr was 0.002, is 0.003": what changes the steps and may change, but goes on with other values than the
// checkpoint's run had; "": nothing does. sequences: of the training data, 0: not known.
std::string changed_flags(const Manifest& manifest, const Options& options, int64_t sequences);

}  // namespace llamac
