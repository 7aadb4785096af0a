#include "core/context.h"

#include "core/observer.h"
#include "platform/ranges.h"

namespace llamac {

Context computing_context() {
    return {device_properties().emulated ? Backend::host : Backend::device};
}

Backend computing_backend() {
    try {
        return computing_context().backend;
    } catch (const Error&) {
        return Backend::device;
    }
}

void copy_bytes_async(const Context& context, void* to, const void* from, int64_t bytes) {
    const Range range("copy");
    if (context.observer) context.observer->before(context.stream);
    CHECK(hipMemcpyAsync(to, from, static_cast<size_t>(bytes), hipMemcpyDefault, context.stream));
    if (context.observer) context.observer->after_copy(bytes, context.stream);
}

void copy_rows_async(const Context& context, void* to, int64_t to_pitch, const void* from, int64_t from_pitch,
                     int64_t width, int64_t rows) {
    const Range range("copy");
    if (context.observer) context.observer->before(context.stream);
    CHECK(hipMemcpy2DAsync(to, static_cast<size_t>(to_pitch), from, static_cast<size_t>(from_pitch),
                           static_cast<size_t>(width), static_cast<size_t>(rows), hipMemcpyDefault,
                           context.stream));
    if (context.observer) context.observer->after_copy(width * rows, context.stream);
}

}  // namespace llamac
