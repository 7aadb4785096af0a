#include "platform/stream.h"

#include <utility>

#include "platform/error.h"

namespace llamac {

Event::Event() {
    CHECK(hipEventCreate(&handle));
}
Event::~Event() {
    static_cast<void>(hipEventDestroy(handle));
}
void Event::record(hipStream_t stream) const {
    CHECK(hipEventRecord(handle, stream));
}
void Event::wait() const {
    CHECK(hipEventSynchronize(handle));
}
void Event::wait_event(hipStream_t stream) const {
    CHECK(hipStreamWaitEvent(stream, handle, 0));
}
double Event::ms_since(const Event& begin) const {
    float ms = 0;
    CHECK(hipEventElapsedTime(&ms, begin.handle, handle));
    return ms;
}

#if defined(LLAMAC_CPU)
Stream::Stream() = default;
Stream::~Stream() = default;
Graph::Graph(hipStream_t stream_, std::function<void()> work_) : stream(stream_), work(std::move(work_)) {}
Graph::~Graph() = default;
void Graph::replay() {
    work();
}
bool is_capturing(hipStream_t) {
    return emulated_capture;
}
#else
Stream::Stream() {
    CHECK(hipStreamCreate(&handle));
}
Stream::~Stream() {
    static_cast<void>(hipStreamDestroy(handle));
}

Graph::Graph(hipStream_t stream_, std::function<void()> work_) : stream(stream_), work(std::move(work_)) {
    hipGraph_t graph = nullptr;
    hipGraphExec_t instance = nullptr;
    // Calls of other threads, as PyTorch's allocator, are not captured and may allocate. (Under HIP, if they free memory or wait
    // for the device, the capture still fails.)
    CHECK(hipStreamBeginCapture(stream, hipStreamCaptureModeThreadLocal));
    work();
    CHECK(hipStreamEndCapture(stream, &graph));
    CHECK(instantiate_graph(&instance, graph));
    CHECK(hipGraphDestroy(graph));
    executable = instance;
}
Graph::~Graph() {
    static_cast<void>(hipGraphExecDestroy(static_cast<hipGraphExec_t>(executable)));
}
void Graph::replay() {
    CHECK(hipGraphLaunch(static_cast<hipGraphExec_t>(executable), stream));
}
bool is_capturing(hipStream_t stream) {
    if (!stream) return false;  // never recorded, and an error to ask while another one is
    hipStreamCaptureStatus status = hipStreamCaptureStatusNone;
    CHECK(hipStreamIsCapturing(stream, &status));
    return status != hipStreamCaptureStatusNone;
}
#endif

}  // namespace llamac
