#include "program/stop.h"

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "platform/error.h"

namespace llamac {
namespace {

constexpr struct {
    int number;
    const char* name;
} answered[] = {
    {SIGHUP, "SIGHUP"}, {SIGINT, "SIGINT"}, {SIGTERM, "SIGTERM"}, {SIGUSR1, "SIGUSR1"}, {SIGUSR2, "SIGUSR2"}};

std::atomic<int> first_signal = 0, received = 0;
std::atomic<unsigned> seconds_to_agree = 0;
static_assert(std::atomic<int>::is_always_lock_free);  // for a handler

// In a handler: nothing that allocates, and nothing that waits for a reader of stderr.
void say(int signal, const char* text) {
    char line[200] = "train_llama3: ";
    strncat(line, signal_name(signal), 20);
    strncat(line, text, 150);
    pollfd ready{STDERR_FILENO, POLLOUT, 0};
    if (poll(&ready, 1, 0) == 1 && write(STDERR_FILENO, line, strlen(line)) < 0) return;
}

void on_signal(int signal) {
    const int error = errno;
    int none = 0;
    first_signal.compare_exchange_strong(none, signal);
    const int came = ++received;
    if (came == 1) alarm(seconds_to_agree);
    if (came == 2)
        say(signal, ": the run is already ending, with a checkpoint; a third signal ends it at once\n");
    if (came >= 3) {
        say(signal, ": third signal: ended at once; a checkpoint that was being written is lost\n");
        _exit(exit_code_of(signal));
    }
    errno = error;
}

void on_alarm(int) {
    say(first_signal, ": the other ranks do not answer: ended at once, without a checkpoint\n");
    _exit(exit_code_of(first_signal));
}

}  // namespace

void limit_agreement(unsigned seconds) {
    seconds_to_agree = seconds;
    alarm(first_signal != 0 ? seconds : 0);
}

void answer_stop_signals() {
    std::signal(SIGALRM, on_alarm);
    for (const auto& signal : answered) {
        struct sigaction action{};
        CHECK(sigaction(signal.number, nullptr, &action) == 0);
        if (action.sa_handler == SIG_IGN) continue;
        action = {};
        action.sa_handler = on_signal;
        action.sa_flags = SA_RESTART;  // libraries do not expect EINTR
        CHECK(sigaction(signal.number, &action, nullptr) == 0);
    }
}

int stop_signal() {
    return first_signal;
}

int stop_signals() {
    return received;
}

const char* signal_name(int signal) {
    for (const auto& known : answered)
        if (known.number == signal) return known.name;
    return "a signal";
}

void ignore_write_signals() {
    for (const int signal : {SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_IGN);
}

}  // namespace llamac
