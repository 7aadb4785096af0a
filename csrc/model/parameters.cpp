#include "model/parameters.h"

#include <fnmatch.h>
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <ranges>
#include <set>
#include <utility>

#include "core/device_memory.h"
#include "core/random.h"
#include "model/block.h"
#include "ops/operations.h"

namespace llamac {
namespace {

constexpr int64_t alignment = 64;   // elements: 128 bytes of bf16
constexpr int64_t shard_rows = 16;  // of a matrix: a shard has a multiple
// The rows of the As of a linear: libraries multiply rows of 16 bytes. Those that rank does not fill are zeros and stay so.
constexpr int64_t lora_multiple = 8;
// Spare columns and rows of frozen weights: rows begin at multiples of 128 bytes, and sums fill the steps of products.
constexpr int64_t spare_multiple = 64;

int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// Where the next flat parameter begins, in a buffer of all elements; divided by the number of shards, in one of shards.
int64_t end_of(const Parameters& p) {
    const Segment& last = p.segments.back();
    return last.offset + last.elements;
}

// Progress of fill_table().
struct Filling {
    const std::vector<std::string>& frozen;
    const bool codes;
    const Lora& lora;
    int64_t rows = 0, adapters = 0;  // also of layers that this model does not hold
    // So far, and of the largest coded one.
    int64_t frozen_elements = 0, coded_elements = 0, coded_rows = 0, largest_encoded = 0, widest_coded = 0;
};

bool is_frozen(const std::string& name, const std::vector<std::string>& patterns) {
    return std::any_of(patterns.begin(), patterns.end(),
                       [&](const std::string& each) { return fnmatch(each.c_str(), name.c_str(), 0) == 0; });
}

// Where the elements of one parameter of a flat one lie, from `offset` on, and which of them are this rank's.
void place(const Parameters& p, Parameter& parameter, const FlatParam& flat, int64_t offset) {
    parameter.offset = offset;
    if (!flat.trains) return;
    const int64_t own = flat.offset + p.sharding.place() * flat.shard, elements = parameter.elements();
    parameter.first = std::clamp<int64_t>(own - offset, 0, elements);
    parameter.count = std::clamp<int64_t>(own + flat.shard - offset, 0, elements) - parameter.first;
    parameter.place = flat.offset / p.sharding.group + std::max<int64_t>(0, offset - own);
}

// The row's number among the streams of random numbers: those of weights are the same beside adapters. The embedding's is the first.
int64_t next_number(Filling& filling, const ParameterRow& row) {
    constexpr int64_t first_adapter = int64_t{1} << 20;
    if (row.is_copy) return 0;
    return row.group.adapter ? first_adapter + filling.adapters++ : filling.rows++;
}

// From row to row, where it lies.
int64_t row_elements(const FlatParam& flat) {
    return flat.elements() / flat.shape[0] + (flat.coded ? 0 : flat.spare_columns);
}

// A row as a part of a flat parameter, from `offset` on.
Parameter parameter_of(const Parameters& p, Filling& filling, const std::string& prefix,
                       const ParameterRow& row, const FlatParam& flat, int64_t offset) {
    Parameter parameter{};
    static_cast<FlatParam&>(parameter) = flat;
    parameter.shape = row.shape;
    parameter.first_row += (offset - flat.offset) / row_elements(flat);
    parameter.name = (row.group.adapter ? "base_model.model." : "") + prefix + row.name;
    parameter.group = row.group;
    parameter.transposed = row.transposed;
    parameter.slice = {row.shape, p.tensor, flat.split, row.blocks};
    Slice& slice = parameter.slice;
    if (row.flat == &p.embedding || row.flat == &p.head) {
        slice.whole[0] = p.vocabulary;
        slice.size = tokens_per_rank(p.vocabulary, p.tensor.ranks);
    } else if (flat.split) {
        int64_t& size = slice.whole[*flat.split == Split::inputs];
        slice.size = size / row.blocks;
        size *= p.tensor.ranks;
    }
    if (!flat.trains) parameter.group.update = Update::none;
    parameter.rng_stream = static_cast<uint32_t>(4 * next_number(filling, row));
    place(p, parameter, flat, offset);
    return parameter;
}

void end_frozen(Filling& filling, const FlatParam& flat) {
    const int64_t elements = flat.coded ? flat.elements() : flat.elements_with_room();
    (flat.coded ? filling.coded_elements : filling.frozen_elements) =
        round_up(flat.offset + elements, alignment);
    if (flat.is_encoded())
        filling.largest_encoded = std::max(filling.largest_encoded, flat.elements_with_room());
    if (!flat.coded) return;
    filling.coded_rows += flat.shape[0];
    filling.widest_coded = std::max(filling.widest_coded, flat.shape[1]);
}

// Room beside the frozen weights that adapters join.
void make_room(BlockParameters& block, const std::vector<LoraTarget>& targets, int64_t rank) {
    for (const LinearRow& row : block_linears) {
        FlatParam& weight = block.*row.weight;
        int64_t width = 0;
        for (const LoraTarget& target : targets) width += target.adapter == row.adapter ? rank : 0;
        for (const LoraTarget& target : targets) {
            if (target.adapter != row.adapter) continue;
            if (target.joins_columns()) weight.spare_columns = round_up(width, spare_multiple);
            if (target.joins_rows()) weight.spare_rows = round_up(width, spare_multiple);
        }
    }
}

// Sets how tensor parallelism divides a block's linears. Norms see this rank's rows, or heads, alone.
void divide(BlockParameters& block) {
    for (const LinearRow& row : block_linears) {
        (block.*row.weight).split = row.split;
        if (row.split == Split::outputs) (block.*row.bias).split = row.split;
        // Of A [rank,in] and Bᵀ [rank,out], one is divided by columns (B by rows), and the gradient of the other is a sum.
        Adapter& adapter = block.*row.adapter;
        for (FlatParam* flat : {&adapter.a, &adapter.b[0], &adapter.b[1], &adapter.b[2]})
            if ((flat == &adapter.a) == (row.split == Split::inputs))
                flat->split =
                    flat != &adapter.a && (block.*row.weight).spare_columns ? Split::outputs : Split::inputs;
            else
                flat->partial = true;
        if (row.norm) (block.*row.norm).partial = (block.*row.norm_bias).partial = true;
    }
    block.q_norm.partial = block.k_norm.partial = true;
}

// A segment of the rows, or, where the model does not hold them, nothing.
void add(Parameters& p, Filling& filling, const std::string& prefix, const std::vector<ParameterRow>& rows,
         bool held) {
    std::vector<const ParameterRow*> present;
    for (const ParameterRow& row : rows)
        if (row.present) present.push_back(&row);
    const auto trains = [&](const ParameterRow& row) {
        return row.group.update != Update::none &&
               (row.group.adapter || !is_frozen(prefix + row.name, filling.frozen));
    };
    if (!held) {
        for (const ParameterRow* row : present) {
            const FlatParam flat{.shape = row->shape, .trains = trains(*row), .split = row->flat->split};
            p.elsewhere.push_back(parameter_of(p, filling, prefix, *row, flat, 0));
        }
        return;
    }
    const int64_t shards = p.sharding.group, segment = static_cast<int64_t>(p.segments.size());
    p.segments.push_back({p.segments.empty() ? 0 : end_of(p)});
    for (size_t i = 0; i < present.size();) {
        const ParameterRow& first = *present[i];
        FlatParam& flat = *first.flat;
        flat = {.shape = first.shape,
                .segment = segment,
                .trains = trains(first),
                .split = flat.split,
                .partial = flat.partial,
                .is_copy = first.is_copy,
                .spare_columns = flat.spare_columns,
                .spare_rows = flat.spare_rows};
        flat.coded = !flat.trains && filling.codes && !prefix.empty() && flat.shape.size() == 2;
        flat.offset = flat.trains ? end_of(p) : flat.coded ? filling.coded_elements : filling.frozen_elements;
        flat.first_row = filling.coded_rows;
        const size_t begin = i;
        for (i++; i < present.size() && present[i]->flat == &flat; i++) flat.shape[0] += present[i]->shape[0];
        flat.shape[0] += first.padding;
        const int64_t row = flat.elements() / flat.shape[0];
        // Adapters have few rows.
        const int64_t multiple = first.group.adapter && row % shard_rows == 0 ? 1 : shard_rows;
        flat.shard =
            shards == 1 ? flat.elements() : round_up(flat.shape[0], shards * multiple) / shards * row;
        int64_t offset = flat.offset;
        for (size_t k = begin; k < i; k++) {
            if (trains(*present[k]) != flat.trains)
                fail(prefix, first.name, " and ", prefix, present[k]->name,
                     " are one matrix: expected both or neither of them frozen");
            p.table.push_back(parameter_of(p, filling, prefix, *present[k], flat, offset));
            offset += present[k]->shape[0] * row_elements(flat);
        }
        if (!flat.trains) {
            end_frozen(filling, flat);
            continue;
        }
        p.segments.back().elements =
            round_up(flat.offset + shards * flat.shard, shards * alignment) - p.segments.back().offset;
        p.segments.back().flat_params.push_back(flat);
    }
}

void fill_table(Parameters& p, const Config& c, Filling& filling) {
    p.blocks.resize(static_cast<size_t>(c.L));
    if (p.tensor.ranks > 1) {
        p.embedding.split = p.head.split = Split::outputs;
        p.final_norm.partial = p.final_norm_bias.partial = true;
    }
    add(p, filling, "", parameters_before_blocks(c, p), p.holds_embedding());
    if (!p.holds_embedding()) p.segments.emplace_back();  // the first segment of a block is the second
    for (int64_t l = 0; l < c.L; l++) {
        make_room(p.blocks[l], lora_targets(c, filling.lora), filling.lora.rank);
        if (p.tensor.ranks > 1) divide(p.blocks[l]);
        std::vector<ParameterRow> rows = block_parameters(c, p.blocks[l], l);
        for (const ParameterRow& row : adapter_parameters(c, p.blocks[l], filling.lora)) rows.push_back(row);
        add(p, filling, block_prefix(c, l), rows, p.holds(l));
    }
    std::vector<ParameterRow> after = parameters_after_blocks(c, p);
    if (c.tied && p.holds_head() && !p.holds_embedding()) {
        after.push_back(parameters_before_blocks(c, p).front());
        after.back().flat = &p.head, after.back().is_copy = true;
    }
    add(p, filling, "", after, p.holds_head());
    if (!p.holds_head()) p.segments.push_back({end_of(p)});
    p.is_tied = c.tied;
    if (c.tied && p.holds_embedding()) p.head = p.embedding;
    // Behind the last tensor is no gap.
    for (Segment& segment : std::views::reverse(p.segments)) {
        p.elements = segment.offset + segment.elements;
        if (segment.flat_params.empty()) continue;
        const FlatParam& last = segment.flat_params.back();
        if (p.sharding.group == 1) p.elements = last.offset + last.elements();
        segment.elements = p.elements - segment.offset;
        break;
    }
}

// Elements of all rows that are chosen, without a table of every layer.
int64_t count(const Config& c, bool (*chosen)(const ParameterRow&)) {
    ModelParameters model;
    BlockParameters block;
    const auto sum = [&](const std::vector<ParameterRow>& rows) {
        int64_t elements = 0;
        for (const ParameterRow& row : rows)
            if (row.present && chosen(row)) elements += FlatParam{0, row.shape}.elements();
        return elements;
    };
    return sum(parameters_before_blocks(c, model)) + c.L * sum(block_parameters(c, block)) +
           sum(parameters_after_blocks(c, model));
}

// weight: elements of the whole parameter from `first` on.
void fill(const Context& context, const Parameter& parameter, const Tensor& weight, int64_t first,
          double deviation, uint64_t seed) {
    if (const std::optional<float> value = parameter.group.initial; value || parameter.group.adapter) {
        const HostCopy copy(weight.data, weight.bytes());
        // Uniform between -bound and bound: Kaiming's with a = sqrt(5).
        const double bound = 1 / std::sqrt(static_cast<double>(parameter.slice.whole.back()));
        const auto drawn = [&](int64_t i) {
            const Philox block = random_block(seed, 0, parameter.rng_stream, i / 4);
            return static_cast<float>(bound * (2 * uniform(block.bits[i % 4]) - 1));
        };
        visit_dtype<is_float>(weight.dtype, [&]<class T>() {
            for (int64_t i = 0; i < weight.elements(); i++)
                static_cast<T*>(copy.data)[i] = T(value ? *value : drawn(first + i));
        });
        copy.to_device();
    } else {
        fill_normal(context, {.out = weight,
                              .deviation = deviation,
                              .seed = static_cast<int64_t>(seed),
                              .stream = parameter.rng_stream,
                              .offset = first});
    }
}

}  // namespace

std::vector<LoraTarget> lora_targets(const Config& c, const Lora& lora) {
    using B = BlockParameters;
    const int64_t q = c.q_size(), kv = c.kv_size();
    std::vector<LoraTarget> chosen;
    for (LoraTarget target : {LoraTarget{"q", "self_attn.q_proj", &B::qkv_adapter, 0, q, c.C},
                              {"k", "self_attn.k_proj", &B::qkv_adapter, q, kv, c.C},
                              {"v", "self_attn.v_proj", &B::qkv_adapter, q + kv, kv, c.C},
                              {"o", "self_attn.o_proj", &B::o_adapter, 0, c.C, q},
                              {"gate", "mlp.gate_proj", &B::gate_up_adapter, 0, c.F, c.C},
                              {"up", "mlp.up_proj", &B::gate_up_adapter, c.F, c.F, c.C},
                              {"down", "mlp.down_proj", &B::down_adapter, 0, c.C, c.F}}) {
        if (lora.rank == 0 || std::ranges::count(lora.targets, target.name) == 0) continue;
        for (const LoraTarget& each : chosen) target.index += each.adapter == target.adapter;
        chosen.push_back(target);
    }
    return chosen;
}

std::vector<ParameterRow> adapter_parameters(const Config& c, BlockParameters& p, const Lora& lora) {
    std::vector<ParameterRow> rows;
    const std::vector<LoraTarget> targets = lora_targets(c, lora);
    for (const LoraTarget& t : targets) {
        const int64_t width = lora.rank * std::ranges::count(targets, t.adapter, &LoraTarget::adapter);
        rows.push_back({std::string(t.module) + ".lora_A.weight",
                        &(p.*t.adapter).a,
                        {lora.rank, t.inputs},
                        adapters_a,
                        true,
                        false,
                        round_up(width, lora_multiple) - width});
    }
    for (const LoraTarget& t : targets)
        rows.push_back(
            {std::string(t.module) + ".lora_B.weight", &(p.*t.adapter).b[t.index],
             t.joins_columns() ? std::vector{t.outputs, lora.rank} : std::vector{lora.rank, t.outputs},
             adapters_b, true, !t.joins_columns()});
    return rows;
}

std::string block_prefix(const Config& c, int64_t layer) {
    if (c.is_bert()) return "bert.";  // a block has a norm of the one before
    return (c.is_gpt2() ? "transformer.h." : "model.layers.") + std::to_string(layer) + ".";
}

int64_t FlatParam::elements() const {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

int64_t FlatParam::elements_with_room() const {
    if (!spare_columns && !spare_rows) return elements();
    return (shape[0] + spare_rows) * (shape[1] + spare_columns);
}

Tensor Parameters::in_segment(const Tensor& segment, const FlatParam& p) const {
    return matrix(segment, p.offset - segments[p.segment].offset, p);
}

Tensor Parameters::matrix(const Tensor& buffer, int64_t offset, const FlatParam& p) {
    char* data = static_cast<char*>(buffer.data) + offset * size_of(buffer.dtype);
    if (p.shape.size() == 1) return make_tensor(data, buffer.dtype, {p.shape[0]});
    return make_tensor(data, buffer.dtype, {p.shape[0], p.shape[1]});
}

Tensor Parameters::part(const Tensor& buffer, const Parameter& p, int64_t first, int64_t count) const {
    const int64_t at =
        p.trains && is_shared(buffer) ? p.place + first - p.first : (p.is_encoded() ? 0 : p.offset) + first;
    return make_tensor(static_cast<char*>(buffer.data) + at * size_of(buffer.dtype), buffer.dtype, {count});
}

Tensor Parameters::own(const Tensor& buffer, const FlatParam& p) const {
    const int64_t at = is_shared(buffer) ? p.offset / sharding.group : p.offset + sharding.place() * p.shard;
    return make_tensor(static_cast<char*>(buffer.data) + at * size_of(buffer.dtype), buffer.dtype, {p.shard});
}

// One block is computed with while the next one comes. The last block has the third buffer (plan_gather_buffers()).
size_t Parameters::buffer_of(int64_t segment) const {
    const int64_t last = static_cast<int64_t>(segments.size()) - 1;
    return segment == 0 ? 0 : segment == last ? 1 : static_cast<size_t>(2 + (last - 1 - segment) % 2);
}

Tensor Parameters::transient_weights(int64_t elements_) const {
    return make_tensor(weight_buffers.memory.data, weight_buffers.memory.dtype, {elements_});
}

Tensor Parameters::in_use(const Tensor& buffer, const GatherBuffers& buffers, int64_t segment) const {
    const Tensor& from = is_shared(buffer) ? buffers.memory : buffer;
    const int64_t at = is_shared(buffer) ? buffers.begin[buffer_of(segment)] : segments[segment].offset;
    return make_tensor(static_cast<char*>(from.data) + at * size_of(from.dtype), from.dtype,
                       {segments[segment].elements});
}

std::vector<int64_t> Parameters::writers(int64_t count_) const {
    std::vector<int64_t> elements_of(static_cast<size_t>(count_)), writers;
    for (const Parameter& parameter : table) {
        const auto least = std::ranges::min_element(elements_of);
        writers.push_back(least - elements_of.begin());
        if (!parameter.is_copy) *least += parameter.slice.elements();
    }
    return writers;
}

bool Parameters::holds(int64_t layer) const {
    return std::ranges::any_of(
        layers, [&](const LayerRange& each) { return layer >= each.first && layer < each.end; });
}

int64_t Parameters::segment_of(int64_t layer) const {
    int64_t segment = 1;
    for (const LayerRange& each : layers) segment += std::clamp(layer, each.first, each.end) - each.first;
    return segment;
}

int64_t Parameters::layer_of(int64_t segment) const {
    int64_t before = 1;
    for (const LayerRange& each : layers) {
        if (segment >= before && segment < before + each.end - each.first)
            return each.first + segment - before;
        before += each.end - each.first;
    }
    return -1;
}

int64_t Parameters::trained() const {
    int64_t sum = 0;
    for (const auto* parameters : {&table, &elsewhere})
        for (const Parameter& each : *parameters)
            sum += each.trains && !each.is_copy ? each.slice.elements() : 0;
    return sum;
}

bool Parameters::trains_before(int64_t segment) const {
    return !holds_embedding() || std::any_of(segments.begin(), segments.begin() + segment,
                                             [](const Segment& each) { return !each.flat_params.empty(); });
}

std::pair<int64_t, int64_t> Parameters::held(const Tensor& buffer, const Parameter& p) const {
    if (!p.trains) return {0, buffer.data && buffer.data == weights_with(p).data ? p.elements() : 0};
    return is_shared(buffer) ? std::pair{p.first, p.count} : std::pair{int64_t{0}, p.elements()};
}

Tensor Parameters::held_part(const Tensor& buffer, const Parameter& parameter) const {
    const auto [first, count_] = held(buffer, parameter);
    return part(buffer, parameter, first, count_);
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
    return 6.0 * static_cast<double>(multiplied) +
           6.0 * static_cast<double>(c.q_size() * seen * (c.causal ? 1 : 2));
}

double flops_per_token(const Parameters& p, const Config& c, int64_t T) {
    double flops = flops_per_token(c, T);
    for (const auto* parameters : {&p.table, &p.elsewhere})
        for (const Parameter& each : *parameters)
            if (!each.is_copy && (each.group.adapter || (each.group.multiplied && !each.trains)))
                flops += (each.trains ? 6.0 : -2.0) * static_cast<double>(each.slice.elements());
    return flops;
}

namespace {

void check_frozen(const Parameters& p, const std::vector<std::string>& patterns) {
    const auto matches = [](const std::vector<Parameter>& parameters, const std::string& pattern) {
        return std::ranges::any_of(parameters,
                                   [&](const Parameter& each) { return is_frozen(each.name, {pattern}); });
    };
    for (const std::string& pattern : patterns)
        if (!matches(p.table, pattern) && !matches(p.elsewhere, pattern))
            fail("--freeze: expected patterns of the weights' names, as ", p.table[1].name, ", found ", "\"",
                 pattern, "\", which matches none");
    if (p.elements == 0)
        fail("--freeze: expected weights that train", p.elsewhere.empty() ? "" : " in every stage of --pp",
             ", found patterns that match all of them");
}

// The embedding, the head and one block by turns share memory, since they are not in use together. apart: the other block
// lies outside of it, so that the head comes while the last block is computed with; else beside the first block. A tied
// embedding is in use throughout.
void plan_gather_buffers(GatherBuffers& buffers, const Parameters& p, bool apart, const char* group,
                         DType dtype, Arena& arena) {
    const int64_t first = p.segments.front().elements, last = p.segments.back().elements;
    int64_t block = 0;
    for (size_t i = 1; i + 1 < p.segments.size(); i++) block = std::max(block, p.segments[i].elements);
    const bool tied = p.head.segment == p.embedding.segment;
    const int64_t shared = tied ? first : 0, largest = std::max(block, tied ? last : std::max(first, last)),
                  other = shared + (apart ? largest : block);
    buffers.begin = {0, shared, other, shared};
    buffers.end = {first, shared + last, other + block, shared + block};
    arena.plan(group, &buffers.memory,
               shaped(dtype, {*std::max_element(buffers.end.begin(), buffers.end.end())}));
}

}  // namespace

void plan_parameters(Parameters& p, const Config& config, int64_t vocabulary, const Precision& precision,
                     const Sharding& sharding, const Axis& tensor, const std::vector<LayerRange>& layers,
                     const std::vector<std::string>& frozen, bool frozen_codes, const Lora& lora,
                     bool training, Arena& arena) {
    p.sharding = sharding, p.tensor = tensor, p.vocabulary = vocabulary, p.layers = layers;
    Filling filling{frozen, frozen_codes, lora};
    fill_table(p, config, filling);
    check_frozen(p, frozen);
    if (filling.coded_elements) {
        arena.plan("frozen weights", &p.codes, shaped(DType::e4m3, {filling.coded_elements}));
        arena.plan("frozen weights", &p.code_scales, shaped(DType::f32, {filling.coded_rows}));
        arena.plan("frozen weights in use", &p.column_scales, shaped(DType::f32, {filling.widest_coded}));
    }
    if (filling.largest_encoded)
        arena.plan("frozen weights in use", &p.decoded, shaped(precision.weights, {filling.largest_encoded}));
    if (filling.frozen_elements) {
        arena.plan("frozen weights", &p.frozen, shaped(precision.weights, {filling.frozen_elements}));
        int64_t largest = 0;
        for (const Parameter& each : p.table)
            if (!each.trains && each.shape.size() == 1) largest = std::max(largest, each.elements());
        if (training && largest)
            arena.plan("gradients", &p.frozen_vector, shaped(precision.gradients, {largest}));
    }
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
    for (const StateRow& state : optimizer_states)
        plan(state.group, &(p.*state.buffer), precision.moments, states);
    if (sharding.shares_weights())
        plan_gather_buffers(p.weight_buffers, p, true, "gathered weights", precision.weights, arena);
    if (sharding.shares_gradients())
        plan_gather_buffers(p.gradient_buffers, p, false, "gradients in use", precision.gradients, arena);
    int64_t largest = 0;
    for (const Segment& segment : p.segments) largest = std::max(largest, segment.elements);
    if (sharding.ranks > 1 && sharding.sums.value_or(precision.gradients) != precision.gradients)
        arena.plan("gradients being summed", &p.sums, shaped(*sharding.sums, {largest}));
}

namespace {

// The matrix in longer rows: its place in `frozen`, or all of `decoded`.
Tensor with_room(const Parameters& p, const FlatParam& parameter, bool spare) {
    const Tensor& buffer = parameter.coded ? p.decoded : p.frozen;
    const int64_t columns = parameter.shape[1] + parameter.spare_columns;
    Tensor t = make_tensor(
        static_cast<char*>(buffer.data) + (parameter.coded ? 0 : parameter.offset) * size_of(buffer.dtype),
        buffer.dtype, {parameter.shape[0], columns});
    if (!spare) t.shape[1] = parameter.shape[1];
    return t;
}

struct Coded {
    Tensor codes, scales;
};
Coded coded(const Parameters& p, const FlatParam& parameter) {
    return {make_tensor(static_cast<char*>(p.codes.data) + parameter.offset, p.codes.dtype,
                        {parameter.shape[0], parameter.shape[1]}),
            make_tensor(p.code_scales.as<float>() + parameter.first_row, DType::f32, {parameter.shape[0]})};
}

void read_encoded(const Context& context, const Parameters& p, const FlatParam& parameter,
                  const Tensor& out) {
    Coded from{with_room(p, parameter, false), {}};
    if (parameter.coded) from = coded(p, parameter);
    scale_rows(context,
               {.out = out, .x = from.codes, .row_scale = from.scales, .scale = 1.0, .accumulate = false});
}

}  // namespace

std::vector<Tensor> encoded(const Parameters& p, const FlatParam& parameter) {
    if (!parameter.coded) return {with_room(p, parameter, true)};
    const auto [codes, scales] = coded(p, parameter);
    return {codes, scales};
}

Tensor decode(const Context& context, const Parameters& p, const FlatParam& parameter) {
    const Tensor weight = p.weight(parameter);
    if (!parameter.is_encoded()) return weight;
    read_encoded(context, p, parameter, weight);
    return weight;
}

Tensor decode_with_room(const Context& context, const Parameters& p, const FlatParam& parameter) {
    if (!parameter.spare_columns) return decode(context, p, parameter);
    if (parameter.coded) read_encoded(context, p, parameter, with_room(p, parameter, false));
    return with_room(p, parameter, true);
}

void encode(const Context& context, const Parameters& p, const FlatParam& parameter) {
    if (!parameter.coded)
        return scale_rows(context, {.out = with_room(p, parameter, false),
                                    .x = p.weight(parameter),
                                    .scale = 1.0,
                                    .accumulate = false});
    const auto [codes, scales] = coded(p, parameter);
    quantize_rows(context,
                  {.out = codes,
                   .inverse = scales,
                   .inverse_transposed = make_tensor(p.column_scales.data, DType::f32, {parameter.shape[1]}),
                   .x = p.weight(parameter),
                   .limit = info(codes.dtype).largest});
}

void zero(const Parameters& p) {
    for (const Tensor& t : {p.weights, p.gradients, p.master, p.m, p.v, p.frozen, p.codes,
                            p.weight_buffers.memory, p.gradient_buffers.memory})
        if (t.data) CHECK(hipMemset(t.data, 0, static_cast<size_t>(t.bytes())));
}

namespace {

void initialize(const Context& context, Parameters& p, double deviation, uint64_t seed, bool adapters_alone) {
    for (const Parameter& parameter : p.table) {
        if (adapters_alone && !parameter.group.adapter) continue;
        const Tensor& kept = p.weights_with(parameter);
        const auto [first, held] = p.held(kept, parameter);
        const Tensor weight = kept.data ? p.part(kept, parameter, first, held) : p.transient_weights(held);
        parameter.slice.for_runs(first, held, [&](int64_t at, int64_t in_whole, int64_t count) {
            const Tensor run =
                make_tensor(static_cast<char*>(weight.data) + (at - first) * size_of(weight.dtype),
                            weight.dtype, {count});
            fill(context, parameter, run, in_whole, deviation, seed);
        });
        if (parameter.is_encoded()) encode(context, p, parameter);
        if (!p.master.data || !parameter.trains) continue;
        // The master weights take the rounded values.
        const auto [begin, count] = p.held(p.master, parameter);
        convert(context, {.out = p.held_part(p.master, parameter),
                          .x = p.weights.data ? p.part(p.weights, parameter, begin, count) : weight,
                          .accumulate = false});
    }
    CHECK(hipStreamSynchronize(context.stream));
}

}  // namespace

void initialize(const Context& context, Parameters& p, const Config& config, uint64_t seed) {
    zero(p);
    initialize(context, p, config.initializer_range, seed, false);
}

void initialize_adapters(const Context& context, Parameters& p, uint64_t seed) {
    initialize(context, p, 0, seed, true);
}

}  // namespace llamac
