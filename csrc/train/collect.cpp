#include "train/collect.h"
#include "core/device_memory.h"

#include <algorithm>
#include <cstring>
#include <optional>

namespace llamac {
namespace {

// What a rank sends: elements of a flat parameter from `first` on, of a rank of the tensor axis.
struct Sent {
    int64_t tensor_rank, first;
};

// Exchanges pieces that fit Model::collected. offset: of the flat parameter. sent: by rank; none: other ranks send the same.
void collect(Model& m, Communicator& among, const Tensor& own, int64_t offset,
             const std::vector<std::optional<Sent>>& sent, const std::vector<Whole>& wholes) {
    const int64_t size = size_of(own.dtype), piece = m.collected.bytes() / (among.size * size);
    std::vector<char> received;
    for (int64_t done = 0; done < own.elements(); done += piece) {
        const int64_t count = std::min(piece, own.elements() - done);
        const Tensor all = make_tensor(m.collected.data, own.dtype, {among.size * count});
        all_gather(m.context, among, all,
                   make_tensor(static_cast<char*>(own.data) + done * size, own.dtype, {count}));
        if (wholes.empty()) continue;
        received.resize(static_cast<size_t>(all.bytes()));
        CHECK(hipStreamSynchronize(m.context.stream));
        copy_bytes(received.data(), all.data, all.bytes());
        for (size_t rank = 0; rank < sent.size(); rank++) {
            if (!sent[rank]) continue;
            const int64_t begin = sent[rank]->first + done;
            const char* const from = received.data() + static_cast<int64_t>(rank) * count * size;
            for (const auto& [parameter, to] : wholes) {
                const int64_t before = parameter->offset - offset;
                const int64_t first = std::max<int64_t>(begin - before, 0),
                              end = std::min(begin + count - before,
                                             parameter->slice.part(sent[rank]->tensor_rank));
                parameter->slice.for_runs(sent[rank]->tensor_rank, first, end - first,
                                          [&](int64_t at, int64_t in_whole, int64_t n) {
                                              std::memcpy(static_cast<char*>(to) + in_whole * size,
                                                          from + (at + before - begin) * size,
                                                          static_cast<size_t>(n * size));
                                          });
            }
        }
    }
}

}  // namespace

void collect_weight(Model& m, const Parameter& parameter, const Tensor& weight, void* to) {
    std::vector<std::optional<Sent>> sent;
    for (int64_t rank = 0; rank < m.options.tensor.ranks; rank++) sent.push_back(Sent{rank, 0});
    const std::vector<Whole> wholes = {{&parameter, to}};
    collect(m, *m.tensor, make_tensor(weight.data, weight.dtype, {parameter.slice.part(0)}), parameter.offset,
            sent, to ? wholes : std::vector<Whole>{});
}

void collect_state(Model& m, const Tensor& buffer, const FlatParam& flat, const std::vector<Whole>& wholes) {
    const Axis& tensor = m.options.tensor;
    std::vector<std::optional<Sent>> sent;
    for (int64_t rank = 0; rank < m.world->size; rank++) {
        const int64_t place = rank / tensor.ranks;  // the first group has all shards
        const bool is_copy = place >= m.options.sharding.group || (!flat.split && rank % tensor.ranks > 0);
        sent.push_back(is_copy ? std::nullopt : std::optional(Sent{rank % tensor.ranks, place * flat.shard}));
    }
    collect(m, *m.world, m.parameters.own(buffer, flat), flat.offset, sent, wholes);
}

}  // namespace llamac
