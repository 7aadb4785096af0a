// The mesh of a run's ranks. Its axes, from the innermost: tensor parallelism, which divides each layer among its ranks
// (Shoeybi et al., "Megatron-LM", 2019), and data parallelism, which divides each batch (model/sharding.h).
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace llamac {

// This rank's place on an axis, and the axis' ranks.
struct Axis {
    int64_t rank = 0, ranks = 1;
};

struct Mesh {
    Axis tensor, data;

    int64_t rank_of(int64_t tensor_rank, int64_t data_rank) const {
        return data_rank * tensor.ranks + tensor_rank;
    }
};
// Of `ranks` ranks; `tensor` divides their number.
inline Mesh make_mesh(int64_t rank, int64_t ranks, int64_t tensor) {
    return {{rank % tensor, tensor}, {rank / tensor, ranks / tensor}};
}

// How tensor parallelism divides a weight [out,in] among ranks: by outputs (columns of the product) or by inputs.
enum class Split : uint8_t { outputs, inputs };

// The part of a tensor of the files that each rank of the tensor axis holds: of the rows of each of `blocks` equal blocks, or of the
// columns.
struct Slice {
    std::vector<int64_t> whole;  // the tensor's shape
    Axis axis = {};
    std::optional<Split> split = {};  // none: each rank holds the whole
    int64_t blocks = 1;
    int64_t size = 0;  // rows of a block, or columns, per rank

    int64_t elements() const {
        int64_t product = 1;
        for (const int64_t size_ : whole) product *= size_;
        return product;
    }
    // Elements of a rank's part; the last rank of a vocabulary may have fewer.
    int64_t part(int64_t rank) const {
        const int64_t all = elements(), row = all / whole[0];
        if (!split) return all;
        if (split == Split::inputs) return whole[0] * size;
        return blocks * std::min(size, whole[0] / blocks - rank * size) * row;
    }
    // Calls it for the elements first .. first+count of a rank's part, in runs that are consecutive in the whole tensor: the run's
    // first element in the part and in the whole, and its length.
    template <class Call>
    void for_runs(int64_t rank, int64_t first, int64_t count, const Call& call) const {
        const int64_t row = elements() / whole[0], end = first + count;
        const bool rows = split == Split::outputs;
        const int64_t length = !split ? elements() : rows ? size * row : size;  // of a run
        const int64_t distance = rows ? whole[0] / blocks * row : row;
        for (int64_t at = first; at < end;) {
            const int64_t run = at / length, within = at % length,
                          elements_ = std::min(end, (run + 1) * length) - at;
            call(at, !split ? at : run * distance + rank * length + within, elements_);
            at += elements_;
        }
    }
    template <class Call>
    void for_runs(int64_t first, int64_t count, const Call& call) const {
        for_runs(axis.rank, first, count, call);
    }
};

}  // namespace llamac
