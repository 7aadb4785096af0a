#include "platform/ranks/launch.h"

#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "platform/error.h"

namespace llamac {
namespace {

bool is_free(int port) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    const bool free = fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    if (fd >= 0) close(fd);
    return free;
}

// A MASTER_PORT whose rendezvous port is free. By the process, so that two runs that start together do not both find it.
int find_port() {
    constexpr int lowest = 20000, ports = 8000;
    for (int i = 0; i < ports; i++) {
        const int port = lowest + (static_cast<int>(getpid()) * 7 + i) % ports;
        if (is_free(rendezvous_port(port))) return port;
    }
    fail("--devices: expected a free port from ", rendezvous_port(lowest), " on, found none");
}

// Those that end a run, and those that schedulers warn by.
constexpr int passed_on[] = {SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

void be_rank(int64_t rank, int64_t count, int port, pid_t parent, const sigset_t& mask, char** argv) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(2);  // it died before
    setpgid(0, 0);  // a terminal's Ctrl-C goes to the parent alone, which passes it on once
    const auto set = [](const char* name, int64_t value) { setenv(name, std::to_string(value).c_str(), 1); };
    set("RANK", rank), set("LOCAL_RANK", rank), set("WORLD_SIZE", count), set("LOCAL_WORLD_SIZE", count);
    setenv("MASTER_ADDR", "127.0.0.1", 1), set("MASTER_PORT", port);
    const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency() / count);
    setenv("OMP_NUM_THREADS", std::to_string(cores).c_str(), 0);
    sigprocmask(SIG_SETMASK, &mask, nullptr);
    execv("/proc/self/exe", argv);
    std::fprintf(stderr, "train_llama3: rank %d: cannot start the program again: %s\n",
                 static_cast<int>(rank), std::strerror(errno));
    _exit(2);
}

// The exit status that a shell would report.
int exit_code(int status) {
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

int run_ranks(int64_t count, char** argv, double seconds) {
    const int port = find_port();
    sigset_t awaited, mask;
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGCHLD);
    for (const int signal : passed_on) {
        struct sigaction action{};
        CHECK(sigaction(signal, nullptr, &action) == 0);
        if (action.sa_handler != SIG_IGN) sigaddset(&awaited, signal);
    }
    CHECK(sigprocmask(SIG_BLOCK, &awaited, &mask) == 0);
    std::vector<pid_t> running, ranks;
    bool passed = false;  // a signal
    const auto send = [&](int signal) {
        for (const pid_t pid : running) kill(pid, signal);
    };
    const pid_t parent = getpid();
    for (int64_t rank = 0; rank < count; rank++) {
        const pid_t pid = fork();
        if (pid == 0) be_rank(rank, count, port, parent, mask, argv);
        if (pid < 0) {
            const int reason = errno;
            send(SIGKILL);
            fail("--devices ", count, ": cannot start a process: ", std::strerror(reason));
        }
        running.push_back(pid);
    }
    ranks = running;

    using Clock = std::chrono::steady_clock;
    int result = 0;
    auto deadline = Clock::time_point::max();
    while (!running.empty()) {
        const timespec pause{0, 200'000'000};
        const int signal = sigtimedwait(&awaited, nullptr, &pause);
        if (signal > 0 && signal != SIGCHLD) send(signal), passed = true;
        int status = 0;
        for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
            std::erase(running, pid);
            const int code = exit_code(status);
            if (code == 0 || result != 0) continue;
            // Itself it has said nothing, and the others may not have met it yet.
            if (WIFSIGNALED(status) && !passed)
                std::fprintf(stderr, "train_llama3: rank %d was ended by signal %d (%s)\n",
                             static_cast<int>(std::find(ranks.begin(), ranks.end(), pid) - ranks.begin()),
                             WTERMSIG(status), strsignal(WTERMSIG(status)));
            result = code;
            deadline = Clock::now() +
                       std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
        }
        if (Clock::now() > deadline) send(SIGKILL);
    }
    return result;
}

}  // namespace llamac
