#include "run/version.h"

#include <xxhash.h>

#include <CLI/Version.hpp>
#include <nlohmann/json.hpp>

#include "commit.h"
#include "core/library_gemm.h"
#include "platform/cpu_level.h"
#include "platform/ranks/communicator.h"
#include "run/toml.h"

namespace llamac {
namespace {

std::string dotted(int major, int minor, int patch) {
    return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

std::string libraries() {
    const int xxhash = static_cast<int>(XXH_versionNumber());  // of the library that is loaded
    return std::string("CLI11 ") + CLI11_VERSION + ", nlohmann/json " +
           dotted(NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR, NLOHMANN_JSON_VERSION_PATCH) +
           ", " + toml_library() + ", xxHash " + dotted(xxhash / 10000, xxhash / 100 % 100, xxhash % 100);
}

}  // namespace

std::string version_text() {
    const std::string level = cpu_level(), without = without_gemm_library();
    return "llamac " LLAMAC_VERSION "\ncommit    " LLAMAC_COMMIT "\ncompiler  " LLAMAC_COMPILER
           "\nplatform  " LLAMAC_BUILT_FOR +
           (level.empty() ? "" : "; this process: " + level) + (without.empty() ? "" : "; " + without) +
           "\nlibraries " + libraries() + "\nengines   " + engines_text();
}

std::string engines_text() {
    const std::string collectives = collectives_library();
    return std::string(has_gloo() ? "Gloo" : "no Gloo") + (has_mpi() ? ", MPI" : ", no MPI") +
           (collectives.empty() ? "" : ", " + collectives);
}

const char* version_number() {
    return LLAMAC_VERSION;
}

const char* version_commit() {
    return LLAMAC_COMMIT;
}

}  // namespace llamac
