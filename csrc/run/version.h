// The version of this program and of its compiler and libraries.
#pragma once
#include <string>

namespace llamac {

// Version, commit, compiler, platform, libraries, engines: a line each, as --version prints them.
std::string version_text();

// The libraries between the processes of a run, present and missing: "Gloo, no MPI, RCCL 2.27.7".
std::string engines_text();

const char* version_number();  // "0.2.0"
const char* version_commit();  // "0123456789ab (modified)", or "unknown"

}  // namespace llamac
