// How ranks share a model: nothing (0), the state of the optimizer (1), the gradients too (2), the weights too (3).
// Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
//
// A shard ends at a multiple of 16 rows of a matrix (16 elements of a vector). All shards of a matrix are equally large, so
// that of the last ranks may end in padding, or be nothing else.
#pragma once
#include <cstdint>

namespace llamac {

struct Sharding {
    int64_t rank = 0, ranks = 1;
    int64_t level = 0;

    bool shares(int64_t from) const { return ranks > 1 && level >= from; }
    bool shares_states() const { return shares(1); }
    bool shares_gradients() const { return shares(2); }
    bool shares_weights() const { return shares(3); }
};

}  // namespace llamac
