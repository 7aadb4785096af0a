#include "train/plot.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

namespace llamac {
namespace {

namespace fs = std::filesystem;

// The active environment's Python, else the project's own, else the system's.
std::string find_python() {
    std::vector<fs::path> candidates;
    if (const char* environment = std::getenv("VIRTUAL_ENV"))
        candidates.push_back(fs::path(environment) / "bin/python");
    candidates.push_back(fs::path(LLAMAC_SOURCE_DIR) / ".venv/bin/python");
    for (const fs::path& python : candidates)
        if (access(python.c_str(), X_OK) == 0) return python.string();
    return "python3";
}

// Quietly: what it prints is of no use beside the run's own output. Returns the exit status, -1 if it did not
// start.
int run_quietly(const std::vector<std::string>& command) {
    std::vector<char*> argv;
    for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    pid_t child;
    const int error = posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    int status = 0;
    if (error != 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
    return WEXITSTATUS(status);
}

}  // namespace

std::string draw_loss_plot(const std::string& out) {
    // The package lies beside the sources; an installed one would be found without.
    const std::string bootstrap =
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import runpy; "
        "runpy.run_module('llamac.plot', run_name='__main__')";
    if (run_quietly({find_python(), "-c", bootstrap, LLAMAC_SOURCE_DIR, out}) == 0)
        return "plot " + out + "/loss.png";
    return "no plot (it wants steps in the log, and Python with matplotlib)";
}

}  // namespace llamac
