#include "core/context.h"

#include "platform/ranges.h"

namespace llamac {

Context computing_context() {
    return {device_properties().emulated ? Backend::host : Backend::device};
}

void copy_bytes_async(const Context& context, void* to, const void* from, int64_t bytes) {
    const Range range("copy");
    if (context.observer) context.observer->before(context.stream);
    CHECK(hipMemcpyAsync(to, from, static_cast<size_t>(bytes), hipMemcpyDefault, context.stream));
    if (context.observer) context.observer->after_copy(bytes, context.stream);
}

}  // namespace llamac
