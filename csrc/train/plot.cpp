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

// What draws the plot: a Python, and the folder of its package llamac where that is not installed.
struct Plotter {
    std::string python;
    fs::path package;
};

Plotter find_plotter() {
    const char* const named = std::getenv("LLAMAC_PYTHON");
    if (named && *named) return {named, ""};
    std::error_code none;  // what cannot be looked at is not there
    const fs::path folder = fs::read_symlink("/proc/self/exe", none).parent_path();
    const fs::path build = folder.parent_path();
    const fs::path checkout = build.filename() == "build" ? build.parent_path() : fs::path();
    const fs::path package = fs::exists(checkout / "llamac/plot.py", none) ? checkout : fs::path();
    for (const fs::path& python : {package / ".venv/bin/python", folder / "python3"})
        if (python.is_absolute() && access(python.c_str(), X_OK) == 0) return {python, package};
    return {"python3", package};
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
    const Plotter plotter = find_plotter();
    std::vector<std::string> command = {plotter.python, "-m", "llamac.plot", out};
    if (!plotter.package.empty()) {
        const char* const path = std::getenv("PYTHONPATH");
        const std::string further = path && *path ? std::string(":") + path : "";
        command.insert(command.begin(), {"env", "PYTHONPATH=" + plotter.package.string() + further});
    }
    const int status = run_quietly(command);
    if (status == 0) return "plot " + out + "/loss.png";
    if (status == 2) return "no plot (there are no steps in the log)";
    return "no plot (" + plotter.python + " has no llamac with matplotlib; run `python -m llamac.plot " +
           out + "` with a Python that has, or name it by LLAMAC_PYTHON)";
}

}  // namespace llamac
