#include "train/estimate.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/observer.h"
#include "core/operation.h"
#include "model/pipeline.h"
#include "model/zero.h"
#include "run/toml.h"
#include "train/memory.h"

namespace llamac {
namespace {

using nlohmann::json;

// The assumptions: the shares of published rates that operations and exchanges reach on a device without a row of rates that it
// reaches, and, for all, the least time of an operation. docs/training.md compares estimates with measured runs.
constexpr double product_share = 0.65, memory_share = 0.85, link_share = 0.7, least_seconds = 5e-6;

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

// Ranks that are `distance` apart, the first one of which is the first of a host.
struct Ring {
    const Links& links;
    int64_t ranks, distance;

    // Of a reduce_scatter or an all_gather (an all_reduce is both) in which each rank sends so many bytes, while the rings of the
    // ranks between do the same. As many rings as there are devices in a host leave it through one device each.
    double seconds(double bytes) const {
        if (ranks == 1 || links.to_one == 0) return 0;
        const int64_t in_host = std::clamp<int64_t>(links.per_host / distance, 1, ranks),
                      hosts = (ranks + in_host - 1) / in_host;
        const auto in = static_cast<double>(in_host), between = static_cast<double>(hosts - 1),
                   inside = static_cast<double>(ranks - 1) - between;
        const double host_rate = std::min(links.to_all, (in - 1) * links.to_one),
                     network_rate = in * links.network;
        const double rate = hosts == 1     ? host_rate
                            : in_host == 1 ? network_rate
                                           : std::min(host_rate, network_rate);
        return links.call + inside * links.step_in_host + between * links.step_between_hosts +
               bytes / (link_share * rate);
    }
};

// A step of one device, in seconds: kernels one after another, and the exchanges between them.
struct Stage {
    double forward = 0,
           backward = 0;  // per micro-batch; at ZeRO 2 and 3 with the exchanges that it waits for
    double end = 0;       // after the last micro-batch: the optimizer, and exchanges
    double waited = 0;    // for exchanges, of all micro-batches and the end
    double sent = 0;      // bytes
};

// The exchanges of one segment over the data axis (model/zero.h), in seconds.
struct SegmentExchange {
    double sum = 0, gather = 0;
};

// In the order of the segments.
std::vector<SegmentExchange> segment_exchanges(const Trainer& t, const Links& links, double& sent) {
    const ModelOptions& o = t.model.options;
    const Sharding& s = o.sharding;
    if (s.ranks == 1) return {};
    const auto group = static_cast<double>(s.group), groups = static_cast<double>(s.groups()),
               micro_batches = static_cast<double>(t.accumulation);
    const Ring in_group{links, s.group, o.tensor.ranks}, between{links, s.groups(), o.tensor.ranks * s.group};
    const auto gradient_bytes = static_cast<double>(size_of(s.sums.value_or(o.precision.gradients))),
               weight_bytes = static_cast<double>(size_of(o.precision.weights)),
               sums = s.shares_gradients() ? micro_batches : 1,
               gathers = s.shares_weights() ? 2 * micro_batches : 1;
    std::vector<SegmentExchange> found;
    for (const Segment& segment : t.model.parameters.segments) {
        double elements = 0;
        for (const FlatParam& flat : segment.flat_params) elements += static_cast<double>(flat.elements());
        if (elements == 0) continue;
        const double gradients = elements * gradient_bytes,
                     gathered = s.shares_states() ? elements * weight_bytes : gradients,
                     part = (group - 1) / group, others = (groups - 1) / groups * gradients / group;
        found.push_back({in_group.seconds(part * gradients) + 2 * between.seconds(others),
                         in_group.seconds(part * gathered)});
        sent += sums * (part * gradients + 2 * others) + gathers * part * gathered;
    }
    return found;
}

// The time after kernels of `window` seconds, evenly over the segments, until exchanges have ended of which each begins when the one
// before and the segment's kernels have.
double exchanged_after(double window, const std::vector<double>& exchanges) {
    double end = 0;
    for (size_t i = 0; i < exchanges.size(); i++)
        end = std::max(end, window * static_cast<double>(i + 1) / static_cast<double>(exchanges.size())) +
              exchanges[i];
    return std::max(end - window, 0.0);
}

// The same for a pass that gathers: a segment's weights are gathered while the segment before is computed, and its gradients, of a
// backward pass of ZeRO 3, are summed while the next one is.
double exchanged_around(double window, const std::vector<SegmentExchange>& exchanges, bool sums) {
    const double each = window / static_cast<double>(exchanges.size());
    double exchanged = exchanges.front().gather, gathered = exchanged, computed = 0;
    for (size_t i = 0; i < exchanges.size(); i++) {
        const double ready = gathered;
        if (i + 1 < exchanges.size())
            gathered = exchanged = std::max(exchanged, computed) + exchanges[i + 1].gather;
        computed = std::max(computed, ready) + each;
        if (sums) exchanged = std::max(exchanged, computed) + exchanges[i].sum;
    }
    return std::max(computed, exchanged) - window;
}

// Adds what a step waits for on the data axis.
void add_data_axis(Stage& stage, const Trainer& t, const Links& links) {
    std::vector<SegmentExchange> all = segment_exchanges(t, links, stage.sent);
    if (all.empty() || links.to_one == 0) return;
    const Sharding& s = t.model.options.sharding;
    std::vector<double> gathers, sums;
    for (const SegmentExchange& each : all) gathers.push_back(each.gather);
    for (auto each = all.rbegin(); each != all.rend(); ++each)
        sums.push_back(each->sum + (s.level == 0 ? each->gather : 0));
    const auto micro_batches = static_cast<double>(t.accumulation);
    double forward = 0, backward = 0, end = 0;
    if (s.shares_weights()) {
        forward = exchanged_around(stage.forward, all, false);
        std::reverse(all.begin(), all.end());
        backward = exchanged_around(stage.backward, all, true);
    } else if (s.shares_gradients()) {
        backward = exchanged_after(stage.backward, sums);
    } else {
        end = exchanged_after(stage.backward, sums);
    }
    if (s.shares_states() && !s.shares_weights()) {
        // The optimizer gathers the first segments, and the next forward pass the others.
        std::vector<SegmentExchange> later = all;
        for (size_t i = 0; i < all.size(); i++)
            (static_cast<int64_t>(i) < gathered_by_optimizer ? later[i].gather : gathers[i]) = 0;
        end += exchanged_after(stage.end, gathers) + exchanged_around(stage.forward, later, false);
    }
    stage.forward += forward;
    stage.backward += backward;
    stage.end += end;
    stage.waited += micro_batches * (forward + backward) + end;
}

// Adds the messages between stages, which nothing overlaps.
void add_pipeline_axis(Stage& stage, const Trainer& t, const Links& links) {
    const ModelOptions& o = t.model.options;
    if (o.pipeline.ranks == 1) return;
    const Ring next{links, 2, t.mesh.ranks_per_stage()};
    const auto bytes = static_cast<double>(o.rows() * t.config.C * size_of(o.precision.weights)) /
                       static_cast<double>(o.tensor.ranks),
               micro_batches = static_cast<double>(t.accumulation), chunks = static_cast<double>(o.chunks);
    const double seconds = chunks * next.seconds(bytes);
    stage.forward += seconds;
    stage.backward += seconds;
    stage.waited += 2 * micro_batches * seconds;
    stage.sent += 2 * micro_batches * chunks * bytes;
}

// Counts into `sum`, too.
Stage stage_of(Trainer& t, const PlannedDevice& device, Estimate& sum) {
    Model& m = t.model;
    const Links& links = device.links;
    const Ring tensor{links, m.options.tensor.ranks, 1},
        context{links, m.options.context.ranks, m.options.tensor.ranks};
    Stage stage;
    Counter counter{device, sum};
    const Observer observer{.before = {},
                            .after_run = {},
                            .after_copy = {},
                            .planned = [&](const Call& call) { counter.add(call); },
                            .planned_exchange =
                                [&](ExchangeAxis axis, int64_t bytes) {
                                    const auto sent = static_cast<double>(bytes);
                                    const double seconds =
                                        (axis == ExchangeAxis::tensor ? tensor : context).seconds(sent);
                                    sum.seconds += counter.times * seconds;
                                    stage.waited += counter.times * seconds;
                                    stage.sent += counter.times * sent;
                                }};
    m.context.observer = &observer;
    m.context.dry_run = true;
    if (m.fp8) m.fp8->measured.assign(m.fp8->measured.size(), true);
    const auto micro_batches = static_cast<double>(t.accumulation);
    const auto chunks = static_cast<int64_t>(m.parameters.layers.size());
    // The first micro-batch writes gradients, and later ones add to them.
    for (const bool first : {true, false}) {
        counter.times = first ? 1 : micro_batches - 1;
        if (counter.times == 0) break;
        const bool last = t.accumulation == 1 || !first;
        const double begin = sum.seconds;
        for (int64_t chunk = 0; chunk < chunks; chunk++) forward_layers(m, first, chunk);
        const double between = sum.seconds;
        for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) backward_layers(m, first, last, chunk);
        stage.forward += (between - begin) / micro_batches;
        stage.backward += (sum.seconds - between) / micro_batches;
    }
    counter.times = 1;
    const double begin = sum.seconds;
    optimizer_step(m, {}, 0);
    stage.end = sum.seconds - begin;
    m.context.dry_run = false;
    m.context.observer = nullptr;
    add_data_axis(stage, t, links);
    add_pipeline_axis(stage, t, links);
    return stage;
}

// The first rank of each stage that has other layers than those before, and how many stages have them. Of these, it keeps the most
// micro-batches.
std::vector<std::pair<int64_t, int64_t>> different_stages(const Config& config, const Options& options,
                                                          int64_t count) {
    if (options.pp == 1) return {{0, 1}};
    std::map<std::vector<int64_t>, size_t> known;
    std::vector<std::pair<int64_t, int64_t>> found;
    const std::vector<LayerRange> parts = parts_of(config, model_options(options, 0, count));
    for (int64_t stage = 0; stage < options.pp; stage++) {
        std::vector<int64_t> kind = {stage == 0, stage == options.pp - 1};
        for (int64_t chunk = 0; chunk < options.pp_chunks; chunk++) {
            const LayerRange& part = parts[chunk * options.pp + stage];
            kind.push_back(part.end - part.first);
        }
        const auto [at, is_new] = known.try_emplace(kind, found.size());
        if (is_new) found.emplace_back(stage * (count / options.pp), 0);
        found[at->second].second++;
    }
    return found;
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

Links links_of(const json& table, const json& row) {
    const json &network = table.at("network"), &collective = table.at("collective");
    Links links;
    links.to_all = 1e9 * row.at("gbps").get<double>() * row.at("links").get<double>();
    links.to_one = row.value("switched", false) ? links.to_all : 1e9 * row.at("gbps").get<double>();
    links.network = 1e9 * network.at("gbps").get<double>();
    links.call = 1e-6 * collective.at("call").get<double>();
    links.step_in_host = 1e-6 * collective.at("in_machine").get<double>();
    links.step_between_hosts = 1e-6 * collective.at("between_machines").get<double>();
    return links;
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
                if (is_of(link, name)) device.links = links_of(table, link);
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
    if (options.pp == 1) return ranks;
    const Trainer first(options, {}, ranks);
    int64_t largest = first.model.arena.bytes(), found = 0;
    for (const auto& [rank, stages] : different_stages(first.config, options, count)) {
        if (rank == 0) continue;
        ranks.own = rank;
        const int64_t bytes = Trainer(options, {}, ranks).model.arena.bytes();
        if (bytes > largest) largest = bytes, found = rank;
    }
    ranks.own = found;
    return ranks;
}

std::string assumptions(const PlannedDevice& device) {
    const auto percent = [](double share) { return std::to_string(std::lround(100 * share)) + "% of "; };
    const std::string exchanges = device.links.to_one > 0
                                      ? "exchanges at " + percent(link_share) +
                                            "the published rates of links and of " +
                                            std::to_string(std::lround(8e-9 * device.links.network)) +
                                            " Gbit/s per device between machines"
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

Estimate estimate_step(Trainer& t, const PlannedDevice& table) {
    PlannedDevice device = table;
    device.links.per_host = t.options.devices_per_node;
    Estimate sum;
    sum.memory = t.model.arena.bytes() + runtime_bytes(t.model.options);
    const Stage own = stage_of(t, device, sum);
    const auto micro_batches = static_cast<double>(t.accumulation),
               chunks = static_cast<double>(t.options.pp_chunks);
    double slowest = 0, all = 0, end = 0;
    for (const auto& [rank, stages] : different_stages(t.config, t.options, t.ranks.count)) {
        Stage stage = own;
        if (rank != t.ranks.own) {
            Ranks ranks;
            ranks.own = rank;
            ranks.count = t.ranks.count;
            Trainer other(t.options, std::nullopt, ranks);
            Estimate unused;
            stage = stage_of(other, device, unused);
        }
        const double pass = stage.forward + stage.backward;
        slowest = std::max(slowest, pass);
        all += static_cast<double>(stages) * pass;
        end = std::max(end, stage.end);
    }
    // A stage waits once for each other one's part of a micro-batch: of one chunk, if it has several.
    sum.idle = (all - slowest) / chunks;
    sum.seconds = micro_batches * slowest + sum.idle + end;
    sum.waited = own.waited;
    sum.exchanged = own.sent;
    return sum;
}

double one_device_seconds(const Options& options, int64_t tokens, const PlannedDevice& device) {
    Options one = options;
    one.total_batch_size = tokens;
    one.devices = one.tp = one.cp = one.pp = one.pp_chunks = 1;
    one.zero = 1;
    one.shard_group = 0;
    one.recompute = {};
    one.batch_size = 1;
    Trainer t(one);
    return estimate_step(t, device).seconds;
}

}  // namespace llamac
