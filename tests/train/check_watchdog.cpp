// The watchdog: it ends a process that hangs, by an exit code of its own and with the stack of the thread that hangs; it
// leaves alone what makes progress, what is stopped, and what has not begun.
#include "program/watchdog.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>

#include "check.h"

using namespace llamac;

namespace watchdog_checks {
namespace {

// patient: where a thread that gets no core for a moment must not end the process.
constexpr double limit = 0.5, patient = 2;

void sleep_for(double seconds) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

struct Ended {
    int code;          // -1: by a signal
    std::string said;  // on stderr
};

// Runs `work` in a process of its own; `meanwhile` gets its id. full: nobody reads stderr, which takes nothing any more.
Ended in_process(const std::function<void()>& work, const std::function<void(pid_t)>& meanwhile = {},
                 bool full = false) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    if (full) {
        CHECK(fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0);
        while (write(ends[1], "x", 1) == 1) continue;
        CHECK(fcntl(ends[1], F_SETFL, 0) == 0);
    }
    std::cout.flush();
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        work();
        _exit(0);
    }
    close(ends[1]);
    if (meanwhile) meanwhile(child);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    Ended ended{WIFEXITED(status) ? WEXITSTATUS(status) : -1, ""};
    char bytes[4096];
    for (ssize_t n; !full && (n = read(ends[0], bytes, sizeof bytes)) > 0;) ended.said.append(bytes, n);
    close(ends[0]);
    return ended;
}

// Reads from a pipe that nobody writes to.
void hang() {
    const std::string fifo = in_folder("fifo");
    mkfifo(fifo.c_str(), 0600);
    const int descriptor = open(fifo.c_str(), O_RDWR);
    char byte;
    CHECK(read(descriptor, &byte, 1) == 1);
}

void make_progress(Watchdog& watchdog, double seconds) {
    using Clock = std::chrono::steady_clock;
    for (const auto begin = Clock::now(); Clock::now() - begin < std::chrono::duration<double>(seconds);) {
        watchdog.progress();
        sleep_for(0.02);
    }
}

void hang_watched() {
    Watchdog watchdog(limit);
    watchdog.start();
    watchdog.begins("validation at step", 12);
    hang();
}

TEST(check_hang) {
    const Ended ended = in_process(hang_watched);
    check(ended.code == no_progress_exit_code, "exit code " + std::to_string(ended.code));
    for (const char* part : {"train_llama3: validation at step 12: ", "--watchdog 0.5 ", "exit code 75",
                             "stack:\n", "check_watchdog("})
        check(ended.said.find(part) != ended.said.npos, std::string(part) + " is said: " + ended.said);
}

TEST(check_hang_with_stderr_full) {
    const Ended ended = in_process(hang_watched, {}, true);
    check(ended.code == no_progress_exit_code, "exit code " + std::to_string(ended.code));
}

TEST(check_progress) {
    const Ended ended = in_process([] {
        Watchdog watchdog(patient);
        watchdog.start();
        make_progress(watchdog, 1.5 * patient);
    });
    check(ended.code == 0 && ended.said.empty(), "progress: " + ended.said);
}

TEST(check_not_watched) {
    const Ended ended = in_process([] {
        const Watchdog not_started(limit);
        Watchdog off(0);
        off.start();
        sleep_for(2 * limit);
    });
    check(ended.code == 0 && ended.said.empty(), "before start(), or off: " + ended.said);
}

// As in a debugger: no thread of the process runs.
TEST(check_stopped) {
    const Ended ended = in_process(
        [] {
            Watchdog watchdog(patient);
            watchdog.start();
            make_progress(watchdog, patient);  // by the clock: it goes on right after the stop, and ends
            sleep_for(patient / 2);
        },
        [](pid_t child) {
            sleep_for(patient / 5);
            kill(child, SIGSTOP);
            sleep_for(1.5 * patient);
            kill(child, SIGCONT);
        });
    check(ended.code == 0 && ended.said.empty(), "stopped and continued: " + ended.said);
}

}  // namespace
}  // namespace watchdog_checks
