// Warnings about runs that can be computed but look wrong, one line each.
#pragma once
#include <string>
#include <vector>

#include "train/run_data.h"

namespace llamac {

// data: with training data. sequences: per optimizer step, over all devices.
std::vector<std::string> run_warnings(const Options& options, const Config& config, const RunData& data,
                                      int64_t sequences);

}  // namespace llamac
