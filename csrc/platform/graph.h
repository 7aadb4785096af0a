// The launches of a stretch of host code, recorded once and replayed without the host's cost of each.
#pragma once
#include <functional>

#include "platform/hip.h"

namespace llamac {

// A stream of its own, for RAII. The emulation has none and needs none.
struct Stream {
    hipStream_t handle = nullptr;
    Stream();
    ~Stream();
    Stream(const Stream&) = delete;
};

struct Graph {
    // Records what `work` launches on the stream; nothing runs yet. work allocates nothing and waits for
    // nothing. (The emulation has no graphs: replay calls work.)
    Graph(hipStream_t stream, std::function<void()> work);
    ~Graph();
    Graph(const Graph&) = delete;
    void replay();

  private:
    hipStream_t stream;
    std::function<void()> work;
    void* executable = nullptr;
};

}  // namespace llamac
