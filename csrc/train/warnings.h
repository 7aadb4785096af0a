// Warnings about runs that can be computed but look wrong, one line each.
#pragma once
#include <string>
#include <vector>

#include "data/tokens.h"
#include "model/config.h"
#include "run/options.h"

namespace llamac {

// data: the training data. sequences: per optimizer step, over all devices.
std::vector<std::string> run_warnings(const Options& options, const Config& config, const Loader& data,
                                      int64_t sequences);

}  // namespace llamac
