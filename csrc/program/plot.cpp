#include "program/plot.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <vector>

#include "program/stop.h"

namespace llamac {
namespace {

namespace fs = std::filesystem;

// matplotlib's first start lists the fonts, which takes half a minute at worst.
constexpr int longest_seconds = 60;

// The Python that draws the plot, and the folder of its package llamac if that is not installed.
struct Plotter {
    std::string python;
    fs::path package;
};

Plotter find_plotter() {
    const char* const named = std::getenv("LLAMAC_PYTHON");
    if (named && *named) return {named, ""};
    std::error_code none;  // a path without access counts as missing
    const fs::path folder = fs::read_symlink("/proc/self/exe", none).parent_path();
    const fs::path build = folder.parent_path();
    const fs::path checkout = build.filename() == "build" ? build.parent_path() : fs::path();
    const fs::path package = fs::exists(checkout / "llamac/report/plot.py", none) ? checkout : fs::path();
    for (const fs::path& python : {package / ".venv/bin/python", folder / "python3"})
        if (python.is_absolute() && access(python.c_str(), X_OK) == 0) return {python, package};
    return {"python3", package};
}

// In the child: the command in place of this program. Nothing here allocates: other threads may have held locks.
[[noreturn]] void become(char* const* argv, pid_t parent) {
    // It ends with the program, also if that has ended already.
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent) _exit(127);
    setpgid(0, 0);  // Ctrl-C at the console is the program's
    for (const int signal : {SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_DFL);  // as Python expects them
    const int null = open("/dev/null", O_RDWR);
    for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(null, standard);
    execvp(argv[0], argv);
    _exit(127);
}

// The exit status of the child; -1: a signal ended it, or this function did, at the limit or at one more signal to the
// program. A child that is stopped is no different from one that computes.
int wait_for(pid_t child) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point limit = Clock::now() + std::chrono::seconds(longest_seconds);
    const int signals = stop_signals();
    int status = 0;
    pid_t ended = 0;
    while ((ended = waitpid(child, &status, WNOHANG)) == 0 && Clock::now() < limit &&
           stop_signals() == signals)
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (ended == 0) {  // not waited for: it may hang in a file system, and the program ends soon
        kill(-child, SIGKILL);
        kill(child, SIGKILL);  // it may not be in its own group yet
    }
    return ended == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Without its output. Returns the exit status, -1 if it did not start or did not end.
int run_quietly(const std::vector<std::string>& command) {
    std::vector<char*> argv;
    for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    const pid_t parent = getpid(), child = fork();
    if (child == 0) become(argv.data(), parent);
    return child < 0 ? -1 : wait_for(child);
}

}  // namespace

std::string draw_loss_plot(const std::string& out) {
    const Plotter plotter = find_plotter();
    std::vector<std::string> command = {plotter.python, "-m", "llamac", "plot", out};
    if (!plotter.package.empty()) {
        const char* const path = std::getenv("PYTHONPATH");
        const std::string further = path && *path ? std::string(":") + path : "";
        command.insert(command.begin(), {"env", "PYTHONPATH=" + plotter.package.string() + further});
    }
    const int status = run_quietly(command);
    if (status < 0) return "no plot (`" + plotter.python + " -m llamac plot " + out + "` did not end)";
    if (status == 0) return "plot " + out + "/loss.png";
    if (status == 2) return "no plot (there are no steps in the log)";
    return "no plot (" + plotter.python + " has no llamac with matplotlib; run `python -m llamac plot " +
           out + "` with a Python that has, or name it by LLAMAC_PYTHON)";
}

}  // namespace llamac
