#include "model/parameters.h"

#include <algorithm>

#include "core/random.h"

namespace llamac {
namespace {

constexpr int64_t alignment = 64;  // elements: 128 bytes of bf16
constexpr size_t per_block = 9;

// joins: lies directly behind the parameter before, so that one matrix product serves both.
void add(Parameters& p, const std::string& name, std::vector<int64_t> shape, bool joins = false) {
    int64_t offset = p.table.empty() ? 0 : p.table.back().offset + p.table.back().elements;
    if (!joins) offset = (offset + alignment - 1) / alignment * alignment;
    int64_t elements = 1;
    for (int64_t size : shape) elements *= size;
    p.table.push_back({name, std::move(shape), offset, elements});
}

void fill_table(Parameters& p, const Config& c) {
    add(p, "model.embed_tokens.weight", {c.V, c.C});
    for (int64_t l = 0; l < c.L; l++) {
        const std::string layer = "model.layers." + std::to_string(l) + ".";
        add(p, layer + "input_layernorm.weight", {c.C});
        add(p, layer + "self_attn.q_proj.weight", {c.q_size(), c.C});
        add(p, layer + "self_attn.k_proj.weight", {c.kv_size(), c.C}, true);
        add(p, layer + "self_attn.v_proj.weight", {c.kv_size(), c.C}, true);
        add(p, layer + "self_attn.o_proj.weight", {c.C, c.q_size()});
        add(p, layer + "post_attention_layernorm.weight", {c.C});
        add(p, layer + "mlp.gate_proj.weight", {c.F, c.C});
        add(p, layer + "mlp.up_proj.weight", {c.F, c.C}, true);
        add(p, layer + "mlp.down_proj.weight", {c.C, c.F});
    }
    add(p, "model.norm.weight", {c.C});
    if (!c.tied) add(p, "lm_head.weight", {c.V, c.C});
    p.head = c.tied ? embedding_parameter : p.table.size() - 1;
}

// Everything that starts from zero: also the gaps between tensors, which the gradient norm runs over.
void zero_all(const Parameters& p) {
    for (const Tensor& t : {p.weights, p.gradients, p.master, p.m, p.v})
        if (t.data) CHECK(hipMemset(t.data, 0, static_cast<size_t>(t.bytes())));
}

template <class T>
void fill(const Parameter& parameter, const Tensor& weight, float deviation, uint64_t seed, uint32_t stream) {
    const HostCopy copy(weight.data, weight.bytes());
    T* values = static_cast<T*>(copy.data);
#pragma omp parallel for
    for (int64_t i = 0; i < parameter.elements; i++)
        values[i] = T(parameter.is_matrix() ? deviation * random_normal(seed, 0, stream, i) : 1.0f);
    copy.to_device();
}

}  // namespace

BlockParameters block_parameters(int64_t layer) {
    const size_t first = 1 + static_cast<size_t>(layer) * per_block;
    return {first, first + 1, first + 4, first + 5, first + 6, first + 8};
}

size_t final_norm_parameter(const Config& config) {
    return 1 + static_cast<size_t>(config.L) * per_block;
}

Tensor Parameters::view(const Tensor& buffer, size_t k, size_t count) const {
    const Parameter& p = table[k];
    char* data = static_cast<char*>(buffer.data) + p.offset * size_of(buffer.dtype);
    if (!p.is_matrix()) return make_tensor(data, buffer.dtype, {p.shape[0]});
    int64_t rows = 0;
    for (size_t i = k; i < k + count; i++) rows += table[i].shape[0];
    return make_tensor(data, buffer.dtype, {rows, p.shape[1]});
}

void plan_parameters(Parameters& p, const Config& config, const Precision& precision, Arena& arena) {
    fill_table(p, config);
    const int64_t elements = p.table.back().offset + p.table.back().elements;
    arena.plan("weights", &p.weights, shaped(precision.weights, {elements}));
    if (precision.keeps_master()) arena.plan("master weights", &p.master, shaped(DType::f32, {elements}));
    arena.plan("gradients", &p.gradients, shaped(precision.gradients, {elements}));
    arena.plan("first moments", &p.m, shaped(precision.moments, {elements}));
    arena.plan("second moments", &p.v, shaped(precision.moments, {elements}));
}

void initialize(Parameters& p, const Config& config, uint64_t seed) {
    zero_all(p);
    const float deviation = static_cast<float>(config.initializer_range);
    for (size_t k = 0; k < p.table.size(); k++) {
        const uint32_t stream = static_cast<uint32_t>(4 * k);
        const Tensor weight = p.weight(k);
        const auto fill_as = weight.dtype == DType::f32 ? fill<float> : fill<bf16>;
        fill_as(p.table[k], weight, deviation, seed, stream);
    }
    if (!p.master.data) return;
    HostCopy weights(p.weights.data, p.weights.bytes());
    const HostCopy master(p.master.data, p.master.bytes());
    const bf16* from = static_cast<const bf16*>(weights.from_device().data);
    std::copy_n(from, p.master.shape[0], static_cast<float*>(master.data));
    master.to_device();
}

void load_weights(Parameters& p, const std::string& directory) {
    const WeightFiles files(directory);
    zero_all(p);
    for (size_t k = 0; k < p.table.size(); k++) {
        files.read(p.table[k].name, p.weight(k));
        if (p.master.data) files.read(p.table[k].name, p.view(p.master, k));
    }
}

std::vector<NamedTensor> weight_tensors(const Parameters& p) {
    std::vector<NamedTensor> tensors;
    for (size_t k = 0; k < p.table.size(); k++) tensors.push_back({p.table[k].name, p.weight(k)});
    return tensors;
}

std::vector<NamedTensor> optimizer_tensors(const Parameters& p) {
    std::vector<NamedTensor> tensors;
    const std::pair<const char*, const Tensor*> states[] = {
        {"m.", &p.m}, {"v.", &p.v}, {"master.", &p.master}};
    for (const auto& [prefix, buffer] : states)
        for (size_t k = 0; buffer->data && k < p.table.size(); k++)
            tensors.push_back({prefix + p.table[k].name, p.view(*buffer, k)});
    return tensors;
}

}  // namespace llamac
