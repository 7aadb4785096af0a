#include "model/parameters.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/random.h"

namespace llamac {
namespace {

constexpr int64_t alignment = 64;  // elements: 128 bytes of bf16

void add(Parameters& p, const std::string& prefix, const std::vector<ParameterRow>& rows) {
    const Placement* before = nullptr;
    for (const ParameterRow& row : rows) {
        if (!row.present) continue;
        int64_t offset = p.table.empty() ? 0 : p.table.back().offset + p.table.back().elements();
        if (row.placement == before) {
            row.placement->shape[0] += row.shape[0];
        } else {
            offset = (offset + alignment - 1) / alignment * alignment;
            *row.placement = {offset, row.shape};
        }
        const uint32_t stream = static_cast<uint32_t>(4 * p.table.size());
        p.table.push_back({{offset, row.shape}, prefix + row.name, row.group, stream});
        before = row.placement;
    }
}

void fill_table(Parameters& p, const Config& c) {
    p.blocks.resize(static_cast<size_t>(c.L));
    add(p, "", parameters_before_blocks(c, p));
    for (size_t l = 0; l < p.blocks.size(); l++)
        add(p, "model.layers." + std::to_string(l) + ".", block_parameters(c, p.blocks[l]));
    add(p, "", parameters_after_blocks(c, p));
    if (c.tied) p.head = p.embedding;
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
    for (const Tensor& t : {p.weights, p.gradients, p.master, p.m, p.v})
        if (t.data) CHECK(hipMemset(t.data, 0, static_cast<size_t>(t.bytes())));
}

template <class T>
void fill(const Parameter& parameter, const Tensor& weight, float deviation, uint64_t seed) {
    const HostCopy copy(weight.data, weight.bytes());
    T* values = static_cast<T*>(copy.data);
    const int64_t elements = parameter.elements();
    const bool is_random = parameter.group.initial == Initial::normal;
#pragma omp parallel for
    for (int64_t i = 0; i < elements; i++)
        values[i] = T(is_random ? deviation * random_normal(seed, 0, parameter.stream, i) : 1.0f);
    copy.to_device();
}

}  // namespace

int64_t Placement::elements() const {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

Tensor Parameters::view(const Tensor& buffer, const Placement& p) const {
    char* data = static_cast<char*>(buffer.data) + p.offset * size_of(buffer.dtype);
    if (p.shape.size() == 1) return make_tensor(data, buffer.dtype, {p.shape[0]});
    return make_tensor(data, buffer.dtype, {p.shape[0], p.shape[1]});
}

int64_t count_parameters(const Config& config) {
    return count(config, [](const ParameterRow&) { return true; });
}

double flops_per_token(const Config& c, int64_t T) {
    const int64_t multiplied = count(c, [](const ParameterRow& row) { return row.group.multiplied; });
    return 6.0 * static_cast<double>(multiplied) + 6.0 * static_cast<double>(c.L * c.q_size() * T);
}

void plan_parameters(Parameters& p, const Config& config, const Precision& precision, Arena& arena) {
    fill_table(p, config);
    const int64_t elements = p.table.back().offset + p.table.back().elements();
    arena.plan("weights", &p.weights, shaped(precision.weights, {elements}));
    if (precision.keeps_master())
        arena.plan("master weights", &p.master, shaped(info(precision.weights).arithmetic, {elements}));
    arena.plan("gradients", &p.gradients, shaped(precision.gradients, {elements}));
    arena.plan("first moments", &p.m, shaped(precision.moments, {elements}));
    arena.plan("second moments", &p.v, shaped(precision.moments, {elements}));
}

void initialize(Parameters& p, const Config& config, uint64_t seed) {
    zero_all(p);
    const float deviation = static_cast<float>(config.initializer_range);
    for (const Parameter& parameter : p.table) {
        const Tensor weight = p.weight(parameter);
        visit_dtype<is_float>(weight.dtype, [&]<class T>() { fill<T>(parameter, weight, deviation, seed); });
    }
    if (!p.master.data) return;
    HostCopy weights(p.weights.data, p.weights.bytes());
    const HostCopy master(p.master.data, p.master.bytes());
    convert(weights.from_device().data, p.weights.dtype, master.data, p.master.dtype, p.master.shape[0]);
    master.to_device();
}

void load_weights(Parameters& p, const std::string& directory) {
    const WeightFiles files(directory);
    zero_all(p);
    for (const Parameter& parameter : p.table) {
        files.read(parameter.name, p.weight(parameter));
        if (p.master.data) files.read(parameter.name, p.view(p.master, parameter));
    }
}

std::vector<NamedTensor> weight_tensors(const Parameters& p) {
    std::vector<NamedTensor> tensors;
    for (const Parameter& parameter : p.table) tensors.push_back({parameter.name, p.weight(parameter)});
    return tensors;
}

std::vector<NamedTensor> optimizer_tensors(const Parameters& p) {
    std::vector<NamedTensor> tensors;
    const std::pair<const char*, const Tensor*> states[] = {
        {"m.", &p.m}, {"v.", &p.v}, {"master.", &p.master}};
    for (const auto& [prefix, buffer] : states) {
        if (!buffer->data) continue;
        for (const Parameter& parameter : p.table)
            tensors.push_back({prefix + parameter.name, p.view(*buffer, parameter)});
    }
    return tensors;
}

}  // namespace llamac
