#include "model/parameters.h"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <set>

#include "core/json.h"
#include "core/random.h"

namespace llamac {
namespace {

constexpr int64_t alignment = 64;   // elements: 128 bytes of bf16
constexpr int64_t shard_rows = 16;  // of a matrix: a shard has a multiple

int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// Where the next placement begins, in a buffer of all elements; divided by the number of shards, in one of shards.
int64_t end_of(const Parameters& p) {
    const Segment& last = p.segments.back();
    return last.offset + last.elements;
}

void add(Parameters& p, const std::string& prefix, const std::vector<ParameterRow>& rows) {
    const int64_t shards = p.sharding.group, segment = static_cast<int64_t>(p.segments.size());
    Segment added;
    added.offset = p.segments.empty() ? 0 : end_of(p);
    p.segments.push_back(std::move(added));
    const size_t first = p.table.size();
    std::vector<const ParameterRow*> present;
    for (const ParameterRow& row : rows)
        if (row.present) present.push_back(&row);
    for (size_t i = 0; i < present.size();) {
        Placement& placement = *present[i]->placement;
        placement = {end_of(p), present[i]->shape, segment};
        const size_t begin = i;
        for (i++; i < present.size() && present[i]->placement == &placement; i++)
            placement.shape[0] += present[i]->shape[0];
        const int64_t row = placement.elements() / placement.shape[0];
        placement.shard = shards == 1 ? placement.elements()
                                      : round_up(placement.shape[0], shards * shard_rows) / shards * row;
        int64_t offset = placement.offset;
        for (size_t k = begin; k < i; k++) {
            Parameter parameter{};
            parameter.offset = offset;
            parameter.shape = present[k]->shape;
            parameter.segment = segment;
            parameter.name = prefix + present[k]->name;
            parameter.group = present[k]->group;
            parameter.stream = static_cast<uint32_t>(4 * p.table.size());
            const int64_t own = placement.offset + p.sharding.place() * placement.shard,
                          elements = parameter.elements();
            parameter.first = std::clamp<int64_t>(own - offset, 0, elements);
            parameter.count =
                std::clamp<int64_t>(own + placement.shard - offset, 0, elements) - parameter.first;
            parameter.place = placement.offset / shards + std::max<int64_t>(0, offset - own);
            offset += elements;
            p.table.push_back(std::move(parameter));
        }
        p.segments.back().elements =
            round_up(placement.offset + shards * placement.shard, shards * alignment) -
            p.segments.back().offset;
        p.segments.back().placements.push_back(placement);
    }
    CHECK(p.table.size() > first);
}

void fill_table(Parameters& p, const Config& c) {
    p.blocks.resize(static_cast<size_t>(c.L));
    add(p, "", parameters_before_blocks(c, p));
    for (size_t l = 0; l < p.blocks.size(); l++)
        add(p, "model.layers." + std::to_string(l) + ".", block_parameters(c, p.blocks[l]));
    add(p, "", parameters_after_blocks(c, p));
    if (c.tied) p.head = p.embedding;
    // Behind the last tensor is no gap.
    const Placement& last = p.segments.back().placements.back();
    p.elements = p.sharding.group == 1 ? last.offset + last.elements() : end_of(p);
    p.segments.back().elements = p.elements - p.segments.back().offset;
}

// Elements of all rows that are chosen, without a table of every layer.
int64_t count(const Config& c, bool (*chosen)(const ParameterRow&)) {
    ModelParameters model;
    BlockParameters block;
    const auto sum = [&](const std::vector<ParameterRow>& rows) {
        int64_t elements = 0;
        for (const ParameterRow& row : rows)
            if (row.present && chosen(row)) elements += Placement{0, row.shape}.elements();
        return elements;
    };
    return sum(parameters_before_blocks(c, model)) + c.L * sum(block_parameters(c, block)) +
           sum(parameters_after_blocks(c, model));
}

// Everything that starts from zero: also the gaps between tensors, which the gradient norm runs over.
void zero_all(const Parameters& p) {
    for (const Tensor& t :
         {p.weights, p.gradients, p.master, p.m, p.v, p.weight_slots.memory, p.gradient_slots.memory})
        if (t.data) CHECK(hipMemset(t.data, 0, static_cast<size_t>(t.bytes())));
}

// weight: the parameter's elements from `first` on.
void fill(const Parameter& parameter, const Tensor& weight, int64_t first, float deviation, uint64_t seed) {
    const HostCopy copy(weight.data, weight.bytes());
    const int64_t elements = weight.elements();
    if (parameter.group.initial == Initial::normal)
        fill_normal(copy.data, weight.dtype, elements, deviation, seed, parameter.stream, first);
    else
        visit_dtype<is_float>(weight.dtype,
                              [&]<class T>() { std::fill_n(static_cast<T*>(copy.data), elements, T(1.0f)); });
    copy.to_device();
}

Tensor held_part(const Parameters& p, const Tensor& buffer, const Parameter& parameter) {
    const auto [first, count] = p.held(buffer, parameter);
    return p.part(buffer, parameter, first, count);
}

// The buffers of the optimizer's state and what their tensors' names begin with.
template <class Parameters>
auto optimizer_buffers(Parameters& p) {
    return std::array{std::pair{"m.", &p.m}, std::pair{"v.", &p.v}, std::pair{"master.", &p.master}};
}

// Elements first .. first+out.elements() of a tensor whose rows lie in several files.
void read_rows(const std::vector<SafetensorsFile>& files, const std::string& name, const Parameter& parameter,
               int64_t first, const Tensor& out) {
    int64_t begin = 0;  // of a file's piece
    for (const SafetensorsFile& file : files) {
        const SafetensorsFile::Entry* const entry = file.find(name);
        if (!entry) continue;
        if (entry->dtype != out.dtype)
            fail(file.path(), ": ", name, " is ", llamac::name(entry->dtype), ", expected ",
                 llamac::name(out.dtype));
        std::vector<int64_t> shape = parameter.shape;
        if (!entry->shape.empty()) shape[0] = entry->shape[0];
        const int64_t elements = Placement{0, shape}.elements();
        const int64_t from = std::max(first, begin), to = std::min(first + out.elements(), begin + elements);
        Tensor piece = out;
        piece.shape[0] = std::max<int64_t>(0, to - from);
        piece.data = static_cast<char*>(out.data) + (from - first) * size_of(out.dtype);
        file.read(name, shape, piece.shape[0] ? from - begin : 0, piece);
        begin += elements;
    }
    if (begin != parameter.elements())
        fail(files[0].path(), files.size() > 1 ? " and the other ranks' files" : "", ": ", quote(name),
             ": expected ", parameter.elements(), " elements, found ", begin);
}

}  // namespace

int64_t Placement::elements() const {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

Tensor Parameters::view(const Tensor& buffer, const Placement& p) const {
    CHECK(!is_shared(buffer));
    return in_segment(
        make_tensor(static_cast<char*>(buffer.data) + segments[p.segment].offset * size_of(buffer.dtype),
                    buffer.dtype, {segments[p.segment].elements}),
        p);
}

Tensor Parameters::in_segment(const Tensor& segment, const Placement& p) const {
    char* data =
        static_cast<char*>(segment.data) + (p.offset - segments[p.segment].offset) * size_of(segment.dtype);
    if (p.shape.size() == 1) return make_tensor(data, segment.dtype, {p.shape[0]});
    return make_tensor(data, segment.dtype, {p.shape[0], p.shape[1]});
}

Tensor Parameters::part(const Tensor& buffer, const Parameter& p, int64_t first, int64_t count) const {
    const int64_t at = is_shared(buffer) ? p.place + first - p.first : p.offset + first;
    return make_tensor(static_cast<char*>(buffer.data) + at * size_of(buffer.dtype), buffer.dtype, {count});
}

Tensor Parameters::own(const Tensor& buffer, const Placement& p) const {
    const int64_t at = is_shared(buffer) ? p.offset / sharding.group : p.offset + sharding.place() * p.shard;
    return make_tensor(static_cast<char*>(buffer.data) + at * size_of(buffer.dtype), buffer.dtype, {p.shard});
}

// One block is computed with while the next one comes. The last block has the third slot (plan_slots()).
size_t Parameters::slot_of(int64_t segment) const {
    const int64_t last = static_cast<int64_t>(segments.size()) - 1;
    return segment == 0 ? 0 : segment == last ? 1 : static_cast<size_t>(2 + (last - 1 - segment) % 2);
}

Tensor Parameters::passing_weights(int64_t elements_) const {
    return make_tensor(weight_slots.memory.data, weight_slots.memory.dtype, {elements_});
}

Tensor Parameters::in_use(const Tensor& buffer, const Slots& slots, int64_t segment) const {
    const Tensor& from = is_shared(buffer) ? slots.memory : buffer;
    const int64_t at = is_shared(buffer) ? slots.begin[slot_of(segment)] : segments[segment].offset;
    return make_tensor(static_cast<char*>(from.data) + at * size_of(from.dtype), from.dtype,
                       {segments[segment].elements});
}

int64_t Parameters::writer_of(const Parameter& p, int64_t writers) const {
    return (p.offset + p.elements() / 2) * writers / elements;
}

std::pair<int64_t, int64_t> Parameters::held(const Tensor& buffer, const Parameter& p) const {
    return is_shared(buffer) ? std::pair{p.first, p.count} : std::pair{int64_t{0}, p.elements()};
}

int64_t count_parameters(const Config& config) {
    return count(config, [](const ParameterRow&) { return true; });
}

double flops_per_token(const Config& c, int64_t T) {
    const int64_t multiplied = count(c, [](const ParameterRow& row) { return row.group.multiplied; });
    int64_t seen = 0;  // by a token, in all layers; twice the mean
    for (int64_t layer = 0; layer < c.L; layer++) {
        const int64_t window = c.window_of(layer), W = window ? std::min(window, T) : T;
        seen += W * (2 * T - W) / T;
    }
    return 6.0 * static_cast<double>(multiplied) + 6.0 * static_cast<double>(c.q_size() * seen);
}

namespace {

// The embedding, the head and one block by turns share memory, since they are not in use together. apart: the other block
// lies outside of it, so that the head comes while the last block is computed with; else beside the first block. A tied
// embedding is in use throughout.
void plan_slots(Slots& slots, const Parameters& p, bool apart, const char* group, DType dtype, Arena& arena) {
    // All blocks have the same shapes.
    const int64_t first = p.segments.front().elements, last = p.segments.back().elements,
                  block = p.segments[1].elements;
    const bool tied = p.head.segment == p.embedding.segment;
    const int64_t shared = tied ? first : 0, largest = std::max(block, tied ? last : std::max(first, last)),
                  other = shared + (apart ? largest : block);
    slots.begin = {0, shared, other, shared};
    slots.end = {first, shared + last, other + block, shared + block};
    arena.plan(group, &slots.memory, shaped(dtype, {*std::max_element(slots.end.begin(), slots.end.end())}));
}

}  // namespace

void plan_parameters(Parameters& p, const Config& config, const Precision& precision,
                     const Sharding& sharding, bool training, Arena& arena) {
    p.sharding = sharding;
    fill_table(p, config);
    const int64_t shard = p.elements / sharding.group;
    const auto plan = [&](const char* group, Tensor* buffer, DType dtype, bool shared) {
        arena.plan(group, buffer, shaped(dtype, {shared ? shard : p.elements}));
    };
    if (!training) return plan("weights", &p.weights, precision.weights, false);
    const bool states = sharding.shares_states();
    if (!sharding.shares_weights() || !precision.keeps_master())
        plan("weights", &p.weights, precision.weights, sharding.shares_weights());
    if (precision.keeps_master())
        plan("master weights", &p.master, info(precision.weights).arithmetic, states);
    plan("gradients", &p.gradients, precision.gradients, sharding.shares_gradients());
    plan("first moments", &p.m, precision.moments, states);
    plan("second moments", &p.v, precision.moments, states);
    if (sharding.shares_weights())
        plan_slots(p.weight_slots, p, true, "gathered weights", precision.weights, arena);
    if (sharding.shares_gradients())
        plan_slots(p.gradient_slots, p, false, "gradients in use", precision.gradients, arena);
    int64_t largest = 0;
    for (const Segment& segment : p.segments) largest = std::max(largest, segment.elements);
    if (sharding.ranks > 1 && sharding.sums.value_or(precision.gradients) != precision.gradients)
        arena.plan("gradients being summed", &p.sums, shaped(*sharding.sums, {largest}));
}

void initialize(Parameters& p, const Config& config, uint64_t seed) {
    zero_all(p);
    const float deviation = static_cast<float>(config.initializer_range);
    // The master weights take the rounded values.
    const auto convert_to_master = [&](const Tensor& weight, const Tensor& master) {
        HostCopy weights(weight.data, weight.bytes());
        const HostCopy copy(master.data, master.bytes());
        convert(weights.from_device().data, weight.dtype, copy.data, master.dtype, master.shape[0]);
        copy.to_device();
    };
    for (const Parameter& parameter : p.table) {
        const auto [first, held] = p.held(p.weights, parameter);
        const Tensor weight =
            p.weights.data ? p.part(p.weights, parameter, first, held) : p.passing_weights(held);
        fill(parameter, weight, first, deviation, seed);
        if (!p.master.data) continue;
        const auto [begin, count] = p.held(p.master, parameter);
        convert_to_master(p.weights.data ? p.part(p.weights, parameter, begin, count) : weight,
                          held_part(p, p.master, parameter));
    }
}

namespace {

constexpr const char *embedding_name = "model.embed_tokens.weight", *head_name = "lm_head.weight";

bool has_own_head(const std::string& directory) {
    const WeightFiles files(directory);
    const SafetensorsFile::Entry *const embedding = files.find(embedding_name), *const head =
                                                                                    files.find(head_name);
    if (!embedding || !head) return false;
    if (embedding->shape != head->shape) return true;
    const int64_t elements = Placement{0, head->shape}.elements(), piece = int64_t{1} << 20;
    std::vector<float> a(static_cast<size_t>(std::min(piece, elements))), b(a.size());
    for (int64_t first = 0; first < elements; first += piece) {
        const int64_t count = std::min(piece, elements - first);
        files.read(embedding_name, head->shape, first, make_tensor(a.data(), DType::f32, {count}));
        files.read(head_name, head->shape, first, make_tensor(b.data(), DType::f32, {count}));
        if (!std::equal(a.begin(), a.begin() + count, b.begin())) return true;
    }
    return false;
}

}  // namespace

Config load_config_of_weights(const std::string& directory, std::string& warning) {
    Config config = load_config(directory);
    if (!config.tied || !has_own_head(directory)) return config;
    config.tied = false;
    warning = directory + ": tie_word_embeddings is true, but " + head_name + " is not " + embedding_name +
              ": the model is not tied";
    return config;
}

std::string load_weights(Parameters& p, const std::string& directory) {
    const WeightFiles files(directory);
    const bool tied = p.head.segment == p.embedding.segment;
    std::set<std::string> used;
    if (tied) used.insert(head_name);
    zero_all(p);
    for (const Parameter& parameter : p.table) {
        used.insert(parameter.name);
        // Either name is the one matrix's.
        const bool is_head = tied && parameter.name == embedding_name && !files.find(embedding_name);
        for (const Tensor& buffer : {p.weights, p.master}) {
            if (!buffer.data) continue;
            files.read(is_head && files.find(head_name) ? head_name : parameter.name, parameter.shape,
                       p.held(buffer, parameter).first, held_part(p, buffer, parameter));
        }
    }
    return files.unused(used);
}

std::vector<NamedTensor> optimizer_tensors(const Parameters& p) {
    const int64_t group = p.sharding.rank / p.sharding.group;
    std::vector<NamedTensor> tensors;
    for (const auto& [prefix, buffer] : optimizer_buffers(p)) {
        if (!buffer->data) continue;
        for (const Parameter& parameter : p.table) {
            if (parameter.count == 0 || p.writer_of(parameter, p.sharding.groups()) != group) continue;
            Tensor rows = p.part(*buffer, parameter, parameter.first, parameter.count);
            if (parameter.shape.size() == 2)
                rows = reshape(rows, {parameter.count / parameter.shape[1], parameter.shape[1]});
            tensors.push_back({prefix + parameter.name, rows});
        }
    }
    return tensors;
}

void load_optimizer(Parameters& p, const std::vector<std::string>& paths) {
    std::vector<SafetensorsFile> files;
    files.reserve(paths.size());
    for (const std::string& path : paths) files.emplace_back(path);
    for (const auto& [prefix, buffer] : optimizer_buffers(p)) {
        if (!buffer->data) continue;
        for (const Parameter& parameter : p.table)
            read_rows(files, prefix + parameter.name, parameter, p.held(*buffer, parameter).first,
                      held_part(p, *buffer, parameter));
    }
}

}  // namespace llamac
