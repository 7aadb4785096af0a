// How ranks share a model: nothing (0), the state of the optimizer (1), the gradients too (2), the weights too (3).
// Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
//
// A shard ends at a multiple of 16 rows of a matrix (16 elements of a vector). All shards of a matrix are equally large, so
// that of the last ranks may end in padding, or be nothing else.
//
// Ranks share within groups of consecutive ranks, by default one of all. Groups are replicas of one another: ranks at the same
// place of their group hold the same shards ("HSDP": Zhao et al., "PyTorch FSDP", 2023).
#pragma once
#include <cstdint>
#include <optional>

#include "core/dtype.h"

namespace llamac {

struct Sharding {
    int64_t rank = 0, ranks = 1;
    int64_t level = 0;
    int64_t group = ranks;  // the ranks of each group: divides `ranks`
    std::optional<DType> sums =
        {};  // the type in which ranks exchange and sum gradients; none: the gradients' own

    int64_t groups() const { return ranks / group; }
    int64_t place() const { return rank % group; }
    bool shares(int64_t from) const { return group > 1 && level >= from; }
    bool shares_states() const { return shares(1); }
    bool shares_gradients() const { return shares(2); }
    bool shares_weights() const { return shares(3); }
};

}  // namespace llamac
