// Checkpoints that are written while training continues (--checkpoint-async): a thread writes them from a copy of the
// state in host memory. It calls no function of the device, and uses its own channel for messages to other ranks, so
// neither it nor a step waits for the other.
#pragma once
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "core/device_memory.h"
#include "run/ranks.h"

namespace llamac {

struct AsyncSaves {
    // copy: for the state that this rank writes. Every rank calls it. Throws Error.
    AsyncSaves(const Ranks& run, std::unique_ptr<PinnedMemory<char>> copy);
    AsyncSaves(const AsyncSaves&) = delete;
    // Waits for the thread.
    ~AsyncSaves();

    const std::unique_ptr<PinnedMemory<char>> copy;  // the thread's from start() to finish()
    const Ranks writers;                             // the thread's

    // Calls save() in the thread; what it returns is finish()'s. One at a time.
    void start(const std::function<std::string()>& save);
    // Whether the threads of all ranks are done; every rank calls it. Then finish() does not wait, and where the save has
    // failed, all ranks learn of it between the same two steps.
    bool is_done() const;
    // Waits for the save. Throws its Error.
    std::string finish();

  private:
    const Ranks& ranks;  // of the run
    std::promise<std::string> promise;
    std::future<std::string> result;
    std::thread thread;
};

}  // namespace llamac
