// What this program is and was built with.
#pragma once
#include <string>

namespace llamac {

// Version, commit, compiler, platform, libraries: a line each, as --version prints them.
std::string version_text();

}  // namespace llamac
