// Copies to device memory of data that the host makes piece by piece, such as a file's: two pinned buffers take turns, so that
// one is filled while the other is copied.
#pragma once
#include <optional>

#include "core/device_memory.h"
#include "platform/stream.h"

namespace llamac {

struct Upload {
    static constexpr int64_t max_bytes = int64_t{32} << 20;  // of a piece

    std::vector<char> scratch;  // the caller's, kept from piece to piece

    // write(memory) makes the next `bytes` of `to`: in place, where the host can address it.
    template <class Write>
    void piece(void* to, int64_t bytes, const Write& write) {
        CHECK(bytes <= max_bytes);
        if (device_properties().emulated) return write(to);
        Buffer& buffer = buffers[pieces++ % 2];
        if (buffer.memory)
            buffer.copied.wait();
        else
            buffer.memory.emplace(max_bytes);
        write(buffer.memory->data);
        CHECK(hipMemcpyAsync(to, buffer.memory->data, static_cast<size_t>(bytes), hipMemcpyDefault,
                             stream.handle));
        buffer.copied.record(stream.handle);
    }
    // Returns when all pieces are copied; after an error, the destructor waits for them.
    void finish() const { CHECK(hipStreamSynchronize(stream.handle)); }
    ~Upload() { static_cast<void>(hipStreamSynchronize(stream.handle)); }

  private:
    struct Buffer {
        std::optional<PinnedMemory<char>> memory;
        Event copied;
    };
    Stream stream;
    Buffer buffers[2];
    size_t pieces = 0;
};

}  // namespace llamac
