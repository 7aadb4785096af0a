#include "train/estimate.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/operation.h"
#include "run/toml.h"
#include "train/memory.h"

namespace llamac {
namespace {

using nlohmann::json;

std::string lower(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
    return text;
}

// Adds the operations that are called in a dry run.
struct Counter {
    const PlannedDevice& device;
    Estimate& sum;
    double times = 1;  // that each call is counted

    void add(const Call& call) {
        const double flops = least_flops(call), bytes = least_bytes(call);
        const double moving =
            bytes / (device.reached ? device.reached->memory_rate : memory_share * device.memory_rate);
        const double computing = flops > 0 ? flops / rate(call) : 0;
        sum.flops += times * flops;
        if (moving > computing) sum.moved += times * bytes;
        sum.seconds += times * std::max({computing, moving, least_seconds});
    }

  private:
    // FLOP per second.
    double rate(const Call& call) const {
        const DType dtype = call.tensor[call.op->outputs].dtype;
        const std::string key = is_fp8(dtype) ? "fp8" : name(dtype);
        if (device.reached) {
            for (const PlannedDevice::Operation& known : device.reached->operations)
                if (known.name == call.op->name && has_dimensions(call, known)) return known.flops;
            if (const auto found = device.reached->products.find(key);
                found != device.reached->products.end())
                return found->second;
        }
        const auto found = device.flops.find(key);
        if (found == device.flops.end())
            fail("--device ", device.name, ": configs/tables/devices.toml has no rate of products in ",
                 name(dtype));
        return product_share * found->second;
    }
    static bool has_dimensions(const Call& call, const PlannedDevice::Operation& known) {
        return std::all_of(known.dimensions.begin(), known.dimensions.end(),
                           [&](const auto& entry) { return call[entry.first.c_str()] == entry.second; });
    }
    static bool is_fp8(DType dtype) { return size_of(dtype) == 1; }
};

// Of the rank's stage.
int64_t own_layers(const Trainer& t) {
    int64_t layers = 0;
    for (const LayerRange& chunk : t.model.parameters.layers) layers += chunk.end - chunk.first;
    return layers;
}

// Bytes that a rank sends in a step for tensor parallelism, while nothing is computed: two sums of the residual stream's size per
// block, forward and backward.
double bytes_over_tensor(const Trainer& t) {
    const ModelOptions& o = t.model.options;
    const auto ranks = static_cast<double>(o.tensor.ranks);
    const double stream =
        static_cast<double>(t.accumulation * o.rows() * t.config.C * size_of(o.precision.weights));
    return 4 * static_cast<double>(own_layers(t)) * stream * 2 * (ranks - 1) / ranks;
}

// Bytes that a rank between two stages sends in a step, while nothing is computed.
double bytes_over_pipeline(const Trainer& t) {
    const ModelOptions& o = t.model.options;
    if (o.pipeline.ranks == 1) return 0;
    return 2 *
           static_cast<double>(o.chunks * t.accumulation * o.rows() * t.config.C *
                               size_of(o.precision.weights)) /
           static_cast<double>(o.tensor.ranks);
}

// Likewise for context parallelism: keys and values are gathered in both passes of each block, and their gradients summed.
double bytes_over_context(const Trainer& t) {
    const ModelOptions& o = t.model.options;
    const int64_t row = 2 * t.model.config.NKV * t.config.HD * size_of(o.precision.weights),
                  others = o.context.ranks - 1;
    return 3.0 * static_cast<double>(own_layers(t) * t.accumulation) *
           static_cast<double>(o.rows() * row * others);
}

// Bytes that a rank sends in a step (model/zero.h): each gradient is summed, and each weight gathered, over the group.
double exchanged_bytes(const Trainer& t) {
    const Sharding& s = t.model.options.sharding;
    if (s.ranks == 1) return 0;
    const auto passes = static_cast<double>(t.accumulation);
    const double elements = static_cast<double>(t.model.parameters.trained()) /
                            static_cast<double>(t.mesh.tensor.ranks * t.mesh.pipeline.ranks);
    const Precision& p = t.model.options.precision;
    const double gradients = elements * static_cast<double>(size_of(s.sums.value_or(p.gradients)));
    const double weights = elements * static_cast<double>(size_of(p.weights));
    const double group = static_cast<double>(s.group), part = (group - 1) / group;
    double bytes = part * gradients * (s.shares_gradients() ? passes : 1);
    bytes += part * (s.shares_weights() ? 2 * passes * weights : s.shares_states() ? weights : gradients);
    const auto replicas = static_cast<double>(s.groups());
    return bytes + 2 * (replicas - 1) / replicas * gradients / group;
}

PlannedDevice::Reached reached_rates(const json& row) {
    PlannedDevice::Reached reached;
    reached.memory_rate = 1e9 * row.at("gbps").get<double>();
    reached.error = row.at("error").get<double>();
    for (const auto& [dtype, tflops] : row.at("products").items())
        reached.products[dtype] = 1e12 * tflops.get<double>();
    for (const json& operation : row.at("operation")) {
        PlannedDevice::Operation known;
        for (const auto& [key, value] : operation.items()) {
            if (key == "name")
                known.name = value.get<std::string>();
            else if (key == "tflops")
                known.flops = 1e12 * value.get<double>();
            else
                known.dimensions[key] = value.get<int64_t>();
        }
        reached.operations.push_back(known);
    }
    return reached;
}

}  // namespace

PlannedDevice find_device(const std::string& wanted) {
    const json table = read_table("devices");
    std::string names;
    const auto is_of = [](const json& row, const std::string& name) {
        const json& own = row.at("names");
        return std::find(own.begin(), own.end(), name) != own.end();
    };
    for (const json& row : table.at("device"))
        for (const std::string name : row.at("names")) {
            names += (names.empty() ? "" : ", ") + name;
            if (wanted.empty() || lower(name).find(lower(wanted)) == name.npos) continue;
            PlannedDevice device;
            device.name = name;
            device.memory = row.value("gib", int64_t{0}) << 30;
            device.memory_rate = 1e9 * row.value("gbps", 0.0);
            for (const json& link : table.at("link"))
                if (is_of(link, name))
                    device.link_rate = 1e9 * link.at("gbps").get<double>() * link.at("links").get<double>();
            for (const auto& [dtype, tflops] : row.at("tflops").items())
                device.flops[dtype] = 1e12 * tflops.get<double>();
            for (const json& row_reached : table.at("reached"))
                if (is_of(row_reached, name)) device.reached = reached_rates(row_reached);
            if (device.memory_rate == 0)
                fail("--device ", wanted, ": configs/tables/devices.toml has no gbps of ", name);
            return device;
        }
    fail("--device ", wanted, ": expected a part of one of the names ", names);
}

Options planned_options(const Options& options) {
    Options planned = options;
    if (planned.device.empty()) return planned;
    const PlannedDevice device = find_device(planned.device);
    planned.device = device.name;
    if (planned.device_memory.bytes == 0) planned.device_memory.bytes = device.memory;
    if (planned.device_memory.bytes == 0) fail("--device ", device.name, ": expected also --device-memory");
    return planned;
}

Ranks planned_ranks(const Options& options, int64_t count) {
    Ranks ranks;
    ranks.count = count;
    int64_t largest = 0, found = 0;
    for (int64_t stage = 0; options.pp > 1 && stage < options.pp; stage++) {
        ranks.own = stage * (count / options.pp);
        const int64_t bytes = Trainer(options, {}, ranks).model.arena.bytes();
        if (bytes > largest) largest = bytes, found = ranks.own;
    }
    ranks.own = found;
    return ranks;
}

std::string assumptions(const PlannedDevice& device) {
    const auto percent = [](double share) { return std::to_string(std::lround(100 * share)) + "% of "; };
    const std::string exchanges =
        device.link_rate > 0 ? "exchanges meanwhile, at " + percent(link_share) + "its links' within a host"
                             : std::string("exchanges not counted");
    const std::string start = "estimated for " + device.name + ", not measured: ";
    const std::string end = "; no validation, no checkpoints";
    if (!device.reached)
        return start + "products at " + percent(product_share) +
               "its published FLOP/s, other operations at " + percent(memory_share) + "its memory's rate, " +
               exchanges + "; shares as runs on an H200 reach them" + end;
    std::string products;
    for (const auto& [dtype, rate] : device.reached->products)
        products +=
            (products.empty() ? "" : ", ") + std::to_string(std::lround(rate / 1e12)) + " in " + dtype;
    return start + "products at the library's published TFLOP/s (" + products +
           "), attention as predicted from its code, with errors of up to " +
           std::to_string(std::lround(device.reached->error)) +
           "% on published kernels, other operations at " +
           std::to_string(std::lround(device.reached->memory_rate / 1e9)) + " GB/s, " + exchanges + end;
}

Estimate estimate_step(Trainer& t, const PlannedDevice& device) {
    Model& m = t.model;
    Estimate sum;
    sum.memory = m.arena.bytes() + runtime_bytes(m.options);
    Counter counter{device, sum};
    const Observer observer{
        .before = {}, .after_run = {}, .after_copy = {}, .planned = [&](const Call& call) {
            counter.add(call);
        }};
    m.context.observer = &observer;
    m.context.dry_run = true;
    if (m.fp8) m.fp8->measured.assign(m.fp8->measured.size(), true);
    forward_backward(m, true, t.accumulation == 1);
    counter.times = static_cast<double>(t.accumulation - 1);
    if (t.accumulation > 1) forward_backward(m, false);
    sum.seconds /= 1 - bubble(t.mesh.pipeline.ranks, t.accumulation, t.options.pp_chunks);
    counter.times = 1;
    optimizer_step(m, {}, 0);
    m.context.dry_run = false;
    m.context.observer = nullptr;
    const double waited_for = bytes_over_tensor(t) + bytes_over_context(t) + bytes_over_pipeline(t),
                 meanwhile = exchanged_bytes(t);
    sum.exchanged = waited_for + meanwhile;
    if (device.link_rate > 0) {
        const double rate = link_share * device.link_rate;
        sum.seconds = std::max(sum.seconds, meanwhile / rate) + waited_for / rate;
    }
    return sum;
}

}  // namespace llamac
