#include "program/watchdog.h"

#include <execinfo.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <string>

#include "core/words.h"
#include "platform/error.h"
#include "platform/threads.h"

namespace llamac {
namespace {

const int stack_signal = SIGRTMIN + 7;  // used by neither glibc nor schedulers
std::atomic<bool> printed = false;

// Whether stderr takes a line now: the last words of a process that must end wait for no reader.
bool has_room() {
    pollfd ready{STDERR_FILENO, POLLOUT, 0};
    return poll(&ready, 1, 0) == 1;
}

void say(const std::string& text) {
    if (has_room() && write(STDERR_FILENO, text.data(), text.size()) < 0) return;
}

// Runs in the thread that is watched, wherever it is. backtrace() has been called before, so that it allocates nothing.
void print_stack(int) {
    void* frames[64];
    const int count = backtrace(frames, 64);
    if (has_room()) backtrace_symbols_fd(frames, count, STDERR_FILENO);
    printed = true;
}

}  // namespace

Watchdog::Watchdog(double seconds_) : seconds(seconds_), watched(pthread_self()) {
    if (seconds <= 0) return;
    void* frame = nullptr;
    backtrace(&frame, 1);  // loads its library
    struct sigaction action{};
    action.sa_handler = print_stack;
    action.sa_flags = SA_RESTART;
    CHECK(sigaction(stack_signal, &action, nullptr) == 0);
    thread = start_thread_without_signals([this] { watch(); });
}

Watchdog::~Watchdog() {
    if (!thread.joinable()) return;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        over = true;
    }
    ended.notify_one();
    thread.join();
}

void Watchdog::watch() {
    constexpr int max_ticks = 50;
    const std::chrono::duration<double> tick(seconds / max_ticks);
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex);
    for (int idle = 0; !ended.wait_for(lock, tick, [this] { return over; });) {
        const uint64_t now = done.load(std::memory_order_relaxed);
        idle = started.load(std::memory_order_relaxed) && now == seen ? idle + 1 : 0;
        seen = now;
        if (idle >= max_ticks) end();
    }
}

void Watchdog::end() const {
    say(formatted(
        "train_llama3: %s %lld: expected progress within --watchdog %g seconds, found none; ended with "
        "exit code %d, `--resume auto` continues from the last checkpoint; the main thread's stack:\n",
        activity.load(), static_cast<long long>(at.load()), seconds, no_progress_exit_code));
    pthread_kill(watched, stack_signal);
    for (int i = 0; i < 50 && !printed; i++) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (!printed) say("(it waits in the kernel, which no signal interrupts)\n");
    _exit(no_progress_exit_code);
}

}  // namespace llamac
