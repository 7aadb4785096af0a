// The flags that determine the model.
#pragma once
#include "model/model.h"
#include "run/options.h"

namespace llamac {

// rank: of `ranks` devices.
ModelOptions model_options(const Options& options, int64_t rank = 0, int64_t ranks = 1);

// Whether the launches of a step are recorded as graphs and replayed, by --graphs.
bool replays_graphs(const std::string& graphs, bool by_default = graphs_by_default);

}  // namespace llamac
