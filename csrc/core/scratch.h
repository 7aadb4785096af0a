// Host memory for intermediate results of an operation.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

namespace llamac {

// Memory that is kept between calls: aligned to 64 bytes, grows, is never cleared.
struct Scratch {
    void* data = nullptr;
    size_t bytes = 0;

    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(data); }
    template <class A>
    A* reserve(int64_t elements) {
        const size_t wanted = (static_cast<size_t>(elements) * sizeof(A) + 63) / 64 * 64;
        if (wanted > bytes) {
            std::free(data);
            data = std::aligned_alloc(64, wanted);
            bytes = data ? wanted : 0;
            if (!data) throw std::bad_alloc();
        }
        return static_cast<A*>(data);
    }
};

}  // namespace llamac
