// The data that the options of a run name.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "data/questions.h"
#include "data/tokenizer.h"
#include "data/tokens.h"
#include "model/config.h"
#include "run/options.h"

namespace llamac {

struct RunData {
    std::optional<Loader> train;  // none: --train-data none; the caller provides the batches
    std::optional<Loader> val;    // none: --val-data none
    std::optional<Tokenizer> tokenizer;
    std::vector<Questions> questions;  // of --eval-tasks

    // accumulation: micro-batches per step and rank. Throws Error for data that does not suit the model or the options.
    RunData(const Options& options, const Config& config, int64_t accumulation);
};

// Warnings about runs that can be computed but look wrong, one line each. data: with training data. sequences: per optimizer step,
// over all devices.
std::vector<std::string> run_warnings(const Options& options, const Config& config, const RunData& data,
                                      int64_t sequences);

}  // namespace llamac
