#include "core/arena.h"
#include "core/device_memory.h"

namespace llamac {
namespace {

// A cache line of every processor we know, and more than a 128-bit load needs.
constexpr int64_t alignment = 256;

int64_t padded(int64_t bytes) {
    return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

void Arena::plan(const char* group, Tensor* tensor, const Tensor& planned) {
    constexpr int64_t max_bytes = int64_t{1} << 60;
    CHECK(!memory.data && planned.bytes() >= 0 && planned.bytes() <= max_bytes);
    *tensor = planned;
    rows.push_back({group, tensor, planned.bytes()});
    total += padded(planned.bytes());
    if (total > max_bytes) fail("memory: the run needs more than 2^60 bytes");
}

void Arena::share(Tensor* tensor, const Tensor& planned, const Tensor* first) {
    CHECK(!memory.data);
    *tensor = planned;
    shared.push_back({tensor, first});
}

void Arena::place(void* base) {
    char* at = static_cast<char*>(base);
    for (const Row& row : rows) {
        row.tensor->data = at;
        at += padded(row.bytes);
    }
    for (const Shared& s : shared) {
        s.tensor->data = s.first->data;
        CHECK(static_cast<char*>(s.tensor->data) + s.tensor->bytes() <= at);
    }
}

void Arena::allocate() {
    memory = DeviceMemory(bytes());
    CHECK(hipMemset(memory.data, 0xff, static_cast<size_t>(memory.bytes)));
    place(memory.data);
}

}  // namespace llamac
