// Checkpoints that are written while training continues (--checkpoint-async): a thread writes a copy of the state in host
// memory. It calls no function of the device and has its own channel to other ranks, so steps and saves do not wait for
// each other.
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
    // copy: of the state of this rank. Every rank calls it. Throws Error.
    AsyncSaves(const Ranks& run, std::unique_ptr<PinnedPages> copy);
    AsyncSaves(const AsyncSaves&) = delete;
    // Waits for the thread.
    ~AsyncSaves();

    const std::unique_ptr<PinnedPages> copy;  // the thread's from start() to finish()
    const Ranks writers;                      // the thread's

    // Calls save() in the thread; finish() returns its result. One at a time.
    void start(const std::function<std::string()>& save);
    // Whether the threads of all ranks are done, so that finish() does not wait; every rank calls it.
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
