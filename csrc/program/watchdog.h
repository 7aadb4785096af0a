// Ends a run that makes no progress, so that a scheduler can start it again. Otherwise a device or a file system that
// does not respond would block the machine.
#pragma once
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace llamac {

// The exit code: EX_TEMPFAIL of sysexits.h, "try again later".
inline constexpr int no_progress_exit_code = 75;

// Watches the thread that creates it, from start() on, from a thread that calls no function of the device, which might block.
// Time is counted in its own ticks, so a process that was stopped, as by a debugger, is not ended.
struct Watchdog {
    // seconds: the limit between two signs of progress; 0: none.
    explicit Watchdog(double seconds);
    ~Watchdog();
    Watchdog(const Watchdog&) = delete;

    void start() { started.store(true, std::memory_order_relaxed); }
    // A sign of progress.
    void progress() { done.fetch_add(1, std::memory_order_relaxed); }
    // A sign of progress, and the next activity for the last line: "validation at step" 12. what: a string literal.
    void begins(const char* what, int64_t step) {
        activity.store(what, std::memory_order_relaxed);
        at.store(step, std::memory_order_relaxed);
        progress();
    }

  private:
    void watch();
    [[noreturn]] void end() const;

    const double seconds;
    const pthread_t watched;
    std::atomic<bool> started = false;
    std::atomic<uint64_t> done = 0;
    std::atomic<const char*> activity = "step";
    std::atomic<int64_t> at = 0;
    std::mutex mutex;
    std::condition_variable ended;
    bool over = false;
    std::thread thread;
};

}  // namespace llamac
