// RAII for streams, events and graphs of launches. The emulated device has one thread of work: a stream is empty, an
// event is a reading of the clock, and a graph calls its work again.
#pragma once
#include <functional>

#include "platform/hip.h"

namespace llamac {

struct Stream {
    hipStream_t handle = nullptr;
    Stream();
    ~Stream();
    Stream(const Stream&) = delete;
};

// A moment in a stream's work.
struct Event {
    Event();
    ~Event();
    Event(const Event&) = delete;
    void record(hipStream_t stream) const;
    void wait() const;                          // the host, until the work before it is done
    void wait_event(hipStream_t stream) const;  // later work on that stream waits for this moment
    double ms_since(const Event& begin) const;  // both done

  private:
    hipEvent_t handle;
};

// The launches of host code, captured once and replayed without the host's cost per launch.
struct Graph {
    // Captures the launches of `work` on the stream; nothing runs yet. work must neither allocate nor wait.
    Graph(hipStream_t stream, std::function<void()> work);
    ~Graph();
    Graph(const Graph&) = delete;
    void replay();

  private:
    hipStream_t stream;
    std::function<void()> work;
    void* executable = nullptr;
};

// Whether the stream is being captured, in which case no memory may be allocated.
bool is_capturing(hipStream_t stream);
#if defined(LLAMAC_CPU)
inline bool emulated_capture = false;  // what it returns, for tests
#endif

// Whether --graphs auto replays graphs. On AMD they are untested with llamac, HIP has ended programs in captures over several
// streams (ROCm/rocm-systems#11369), and replays on one MI300X had wrong results without an error (ROCm/clr#279).
#if defined(LLAMAC_AMD)
constexpr bool graphs_by_default = false;
#else
constexpr bool graphs_by_default = true;
#endif

}  // namespace llamac
