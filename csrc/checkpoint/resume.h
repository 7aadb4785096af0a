// The checkpoint to resume, and the options with which it can be resumed.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "run/ranks.h"

namespace llamac {

// A damaged checkpoint: its name in the output folder, and the reason in one line.
struct DamagedName {
    std::string name, reason;
};
struct ResumePoint {
    std::string directory;             // "": the run starts at step 0
    std::optional<Manifest> manifest;  // of the directory, verified
    std::vector<DamagedName> damaged;  // newer ones, newest first, that --resume auto passed over
};
// The checkpoint that --resume asks for: nullopt, the newest complete one in `out`, if there is any; "", none; else this
// directory. Verifies every byte once. Throws Error if all checkpoints, or the directory, are damaged or unreadable. All ranks
// take the checkpoints that rank 0 sees, and share the reading.
ResumePoint find_checkpoint(const std::string& out, const std::optional<std::string>& resume,
                            const Ranks& ranks = one_rank);

// Throws Error if the options have another seed, sequence length, step size, type of weights, master copy or moments than the
// checkpoint, or fewer steps than are done.
void check_resume(const Manifest& manifest, const std::string& directory, const Options& options,
                  int64_t world_size = 1);

// "--lr was 0.002, is 0.003": flags that differ from the checkpoint's, or, without one, from Options::run_values; "": none do.
// sequences: of the training data, 0: not known.
std::string changed_flags(const Manifest* manifest, const Options& options, int64_t sequences);

}  // namespace llamac
