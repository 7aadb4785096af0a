// The stream on which ranks exchange weights and gradients (model/zero.h), beside the model's.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "model/parameters.h"
#include "platform/stream.h"

namespace llamac {

struct Exchanges {
    // A moment in the stream's work.
    struct Moment {
        Event event;
        size_t after = 0;  // calls of enqueue()
    };

    explicit Exchanges(size_t segments) : reduced(segments), reducing(segments) {}

    Stream stream;
    Event computed;  // on the model's stream
    Moment done;
    std::array<Moment, GatherBuffers::count> gathered;  // by the segment's buffer
    std::deque<Moment> reduced;                         // by segment
    std::vector<bool> reducing;  // whether nothing has waited for the segment's reduction yet

    // For tests, on the CPU: work is done when something first waits for a moment behind it, which is as late as a device may do it.
    // So a wait that is missing changes results.
    bool late = false;

    // work: enqueues on the stream.
    void enqueue(std::function<void()> work) {
        enqueued++;
        waiting.push_back(std::move(work));
        if (!late) run_to(enqueued);
    }
    void record(Moment& moment) const {
        moment.event.record(stream.handle);
        moment.after = enqueued;
    }
    // Later work on `on` waits for the moment.
    void wait(const Moment& moment, hipStream_t on) {
        run_to(moment.after);
        moment.event.wait_event(on);
    }

  private:
    void run_to(size_t end) {
        while (ran < end) {
            ran++;
            const std::function<void()> work = std::move(waiting.front());
            waiting.pop_front();
            work();
        }
    }

    size_t enqueued = 0, ran = 0;
    std::deque<std::function<void()>> waiting;
};

}  // namespace llamac
