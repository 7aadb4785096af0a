// The mesh of a run's ranks. Its axes, from the innermost: tensor parallelism, which divides each layer among its ranks
// (Shoeybi et al., "Megatron-LM", 2019), context parallelism, which divides each sequence (model/context_parallel.h), data
// parallelism, which divides each batch (model/sharding.h), and pipeline parallelism, which divides the layers into stages
// (model/pipeline.h).
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
    Axis tensor, context, data, pipeline;

    // A rank of the last stage, which has the losses.
    int64_t rank_of(int64_t tensor_rank, int64_t context_rank, int64_t data_rank) const {
        const int64_t stage = (pipeline.ranks - 1) * data.ranks;
        return ((stage + data_rank) * context.ranks + context_rank) * tensor.ranks + tensor_rank;
    }
    // The context and the data axis as one: its ranks have the same weights and different tokens.
    Axis replicas() const { return {data.rank * context.ranks + context.rank, data.ranks * context.ranks}; }
    int64_t ranks_per_stage() const { return data.ranks * context.ranks * tensor.ranks; }
};
// Of `ranks` ranks; `tensor` * `context` * `pipeline` divides their number.
inline Mesh make_mesh(int64_t rank, int64_t ranks, int64_t tensor, int64_t context, int64_t pipeline) {
    const int64_t per_stage = ranks / pipeline, in_stage = rank % per_stage;
    return {{in_stage % tensor, tensor},
            {in_stage / tensor % context, context},
            {in_stage / tensor / context, per_stage / tensor / context},
            {rank / per_stage, pipeline}};
}

// How context parallelism divides a sequence of T tokens: into 2 * ranks pieces, of which rank i has piece i, then piece
// 2 * ranks - 1 - i. So all ranks have the same number of pairs of a query and a key that it sees. With one rank, the whole sequence.
struct Pieces {
    Axis axis;
    int64_t T;  // a multiple of 2 * ranks

    int64_t size() const { return T / (2 * axis.ranks); }
    // Tokens of the sequence before half 0 or 1 of a rank's tokens.
    int64_t start(int64_t rank, int64_t half) const {
        return (half ? 2 * axis.ranks - 1 - rank : rank) * size();
    }
    int64_t start(int64_t half) const { return start(axis.rank, half); }
    // Which rank has token t, and its place among this rank's tokens.
    struct Place {
        int64_t rank, token;
    };
    Place place(int64_t t) const {
        if (axis.ranks == 1) return {0, t};
        const int64_t piece = t / size(), half = piece < axis.ranks ? 0 : 1;
        return {half ? 2 * axis.ranks - 1 - piece : piece, half * size() + t % size()};
    }
};
// The least T of at least `tokens` that can be divided.
inline int64_t divisible_length(const Axis& context, int64_t tokens) {
    const int64_t pieces = context.ranks > 1 ? 2 * context.ranks : 1;
    return (tokens + pieces - 1) / pieces * pieces;
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
    // A rank's part consists of runs of `length` elements that are consecutive in the whole tensor. There, the first run begins at
    // `start`, and the others follow `distance` apart.
    struct Runs {
        int64_t length, distance, start;
        int64_t in_whole(int64_t element) const {
            return element / length * distance + start + element % length;
        }
    };
    Runs runs(int64_t rank) const {
        const int64_t all = elements(), row = all / whole[0];
        if (!split) return {all, 0, 0};
        if (split == Split::inputs) return {size, row, rank * size};
        return {size * row, whole[0] / blocks * row, rank * size * row};
    }
    bool is_one_run() const { return !split || (split == Split::outputs && blocks == 1); }
    // Calls it for the elements first .. first+count of a rank's part, run by run, with the run's first element in the part and in
    // the whole, and its number of elements.
    template <class Call>
    void for_runs(int64_t rank, int64_t first, int64_t count, const Call& call) const {
        const Runs all = runs(rank);
        for (int64_t at = first; at < first + count;) {
            const int64_t n = std::min(first + count - at, all.length - at % all.length);
            call(at, all.in_whole(at), n);
            at += n;
        }
    }
    template <class Call>
    void for_runs(int64_t first, int64_t count, const Call& call) const {
        for_runs(axis.rank, first, count, call);
    }
};

}  // namespace llamac
