// Sharding among the ranks of the data and the context axis (Mesh::replicas); "rank" means one of these here. Levels: nothing (0),
// the state of the optimizer (1), also the gradients (2), also the weights (3).
// Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
//
// A shard ends at a multiple of 16 rows of a matrix (16 elements of a vector). All shards of a matrix have the same
// size, so the shards of the last ranks may contain padding, or only padding.
//
// Ranks shard within groups of consecutive ranks, by default within one group of all ranks. Groups are replicas of
// one another: ranks with the same position in their group hold the same shards ("HSDP": Zhao et al., "PyTorch FSDP",
// 2023).
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
    // All ranks; with several groups, also the group and its replicas.
    int64_t communicators() const { return ranks == 1 ? 0 : groups() == 1 ? 1 : 3; }
    bool shares(int64_t from) const { return group > 1 && level >= from; }
    bool shares_states() const { return shares(1); }
    bool shares_gradients() const { return shares(2); }
    bool shares_weights() const { return shares(3); }
};

}  // namespace llamac
