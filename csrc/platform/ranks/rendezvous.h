// How ranks find one another: each tells rank 0 what the others are to know of it, and gets what all of them told.
#pragma once
#include <string>
#include <vector>

#include "platform/ranks/launch.h"

namespace llamac {

// This host's address on the way to rank 0's, as a number: 10.0.0.2.
std::string own_address(const Launch& launch);

// Everybody's text, by rank. Rank 0 listens at the launch's port meanwhile. Throws Error where ranks are missing after so
// many seconds, have another number of ranks, or the port is taken.
std::vector<std::string> meet(const Launch& launch, const std::string& purpose, const std::string& text,
                              double seconds);

}  // namespace llamac
