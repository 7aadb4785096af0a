// Going on from a checkpoint: which one, with which options, and what becomes of the files in the output folder.
#pragma once
#include <string>

#include "train/manifest.h"

namespace llamac {

// The directory that --resume means: none: ""; auto: the newest checkpoint in `out`, "" if there is none;
// else itself.
std::string checkpoint_to_resume(const std::string& out, const std::string& resume);

// Error where the options ask for what the checkpoint cannot go on with: another seed, sequence length,
// step, or another type of weights, master copy or moments, or fewer steps than are done.
void check_resume(const Manifest& manifest, const std::string& directory, const Options& options,
                  int64_t world_size = 1);

// "--lr was 0.002, is 0.003": what changes the steps and may change, but goes on with other values than the
// checkpoint's run had; "": nothing does. sequences: of the training data, 0: not known.
std::string changed_flags(const Manifest& manifest, const Options& options, int64_t sequences);

// Makes `out` ready for a run that goes on from `checkpoint` at `step`, or starts anew (""). Going on, the
// log is cut back to that step and newer checkpoints are set aside; anew, whatever an earlier run left is: in
// out/previous_1, _2, ... Returns the line that says so, or "". Call it after everything has been read: the
// model may lie in `out`.
std::string prepare_output(const std::string& out, const std::string& checkpoint, int64_t step);

}  // namespace llamac
