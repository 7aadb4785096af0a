// The first exchange of ranks, through rank 0.
#pragma once
#include <string>
#include <vector>

#include "platform/ranks/launch.h"

namespace llamac {

// The numeric address of this host towards rank 0: 10.0.0.2.
std::string own_address(const Launch& launch);

// Gathers a text per rank. Rank 0 listens at the launch's port meanwhile. Throws Error if ranks are missing after `seconds`,
// have another number of ranks, or the port is taken.
std::vector<std::string> meet(const Launch& launch, const std::string& purpose, const std::string& text,
                              double seconds);

}  // namespace llamac
