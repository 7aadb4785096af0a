#include "checkpoint/async_saves.h"

#include <algorithm>
#include <chrono>

#include "core/device_memory.h"
#include "platform/threads.h"

namespace llamac {

AsyncSaves::AsyncSaves(const Ranks& run, std::unique_ptr<PinnedPages> memory)
    : copy(std::move(memory)), writers(run.beside("checkpoint")), ranks(run) {}

AsyncSaves::~AsyncSaves() {
    if (thread.joinable()) thread.join();
}

void AsyncSaves::start(const std::function<std::string()>& save) {
    CHECK(!thread.joinable());
    promise = {};
    result = promise.get_future();
    thread = start_thread_without_signals([this, save] {
        try {
            promise.set_value(save());
        } catch (...) {
            promise.set_exception(std::current_exception());
        }
    });
}

bool AsyncSaves::is_done() const {
    const bool own = result.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    const std::vector<double> done = ranks.gather("saves", own ? 1 : 0);
    return std::all_of(done.begin(), done.end(), [](double each) { return each == 1; });
}

std::string AsyncSaves::finish() {
    thread.join();
    return result.get();
}

}  // namespace llamac
