#include "core/arena.h"

#include <algorithm>
#include <cstdlib>

namespace llamac {
namespace {

// A cache line of every processor we know, and more than a 128-bit load needs.
constexpr int64_t alignment = 256;

int64_t padded(int64_t bytes) {
    return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

void Arena::Free::operator()(void* p) const {
    std::free(p);
}

void Arena::plan(const char* group, Tensor* tensor, const Tensor& planned) {
    CHECK(!memory);
    *tensor = planned;
    rows.push_back({group, tensor});
}

int64_t Arena::bytes() const {
    int64_t total = 0;
    for (const Row& row : rows) total += padded(row.tensor->bytes());
    return total;
}

void Arena::allocate() {
    const int64_t total = bytes();
    memory.reset(std::aligned_alloc(alignment, static_cast<size_t>(padded(total))));
    if (!memory) fail("memory: ", total >> 20, " MiB are needed, the machine has no room for them");
    char* at = static_cast<char*>(memory.get());
#pragma omp parallel for
    for (int64_t page = 0; page < total; page += 1 << 20)
        std::memset(at + page, 0xff, static_cast<size_t>(std::min<int64_t>(1 << 20, total - page)));
    for (const Row& row : rows) {
        row.tensor->data = at;
        at += padded(row.tensor->bytes());
    }
}

}  // namespace llamac
