#include "train/memory.h"

#include <functional>
#include <set>

#include "core/words.h"

namespace llamac {
namespace {

struct DeviceMemoryInfo {
    int64_t free, total;
};
DeviceMemoryInfo device_memory() {
    size_t free = 0, total = 0;
    CHECK(hipMemGetInfo(&free, &total));
    return {static_cast<int64_t>(free), static_cast<int64_t>(total)};
}

struct Room {
    DeviceMemoryInfo device;
    int64_t later;  // taken by the runtime
};
Room room_for(const Options& options, const ModelOptions& model, Backend backend) {
    const int64_t given = options.device_memory.bytes;  // another machine's device, all of it free
    if (backend == Backend::host && given == 0) return {device_memory(), 0};
    return {given > 0 ? DeviceMemoryInfo{given, given} : device_memory(), runtime_bytes(model)};
}

std::string gib(int64_t bytes) {
    return formatted("%.2f GiB", static_cast<double>(bytes) / (int64_t{1} << 30));
}

// ---- the smallest change of the flags with which a run fits

struct Change {
    std::string flags;
    Options options;
};

// The changes of each kind, the smallest first. ranks: of Mesh::replicas(), which share the weights.
std::vector<Change> sharding_changes(const Options& o, int64_t ranks) {
    std::vector<Change> changes;
    const int64_t now = shard_group(o, ranks);
    for (int64_t group = now; group <= ranks; group++) {
        if (group == 1 || ranks % group != 0) continue;
        for (int64_t level = group == now ? o.zero + 1 : std::max<int64_t>(o.zero, 1); level <= 3; level++) {
            Change change{level == o.zero ? "" : "--zero " + std::to_string(level), o};
            if (group != now)
                change.flags +=
                    (change.flags.empty() ? "" : " ") + ("--shard-group " + std::to_string(group));
            change.options.zero = level;
            change.options.shard_group = group;
            changes.push_back(change);
        }
    }
    return changes;
}
std::vector<Change> recompute_changes(const Options& o, int64_t layers) {
    std::vector<Change> changes;
    const Recompute& now = o.recompute;
    std::vector<std::string> lists;
    if (now.block_every == 0)
        lists = {"norm", "norm,swiglu", "norm,swiglu,attention", "norm,swiglu,qkv,attention"};
    const int64_t first = now.block_every ? std::min(now.block_every, layers) - 1 : 4;
    for (int64_t every = first; every > 1; every--) lists.push_back("block:" + std::to_string(every));
    lists.push_back("block");
    for (const std::string& list : lists) {
        if (list == text_of(now)) continue;
        changes.push_back({"--recompute " + list, o});
        changes.back().options.recompute = parse_recompute(list);
    }
    return changes;
}
std::vector<Change> fp8_changes(const Options& o) {
    if (o.matmul_dtype != MatmulDType::fp8 || o.fp8_weights != Fp8Weights::stored) return {};
    Change change{"--fp8-weights recomputed", o};
    change.options.fp8_weights = Fp8Weights::recomputed;
    return {change};
}
// The same tokens per step in more micro-batches. ranks: all.
std::vector<Change> batch_changes(const Options& o, int64_t ranks) {
    std::set<int64_t, std::greater<>> batches;
    for (int64_t parts = 1; parts * parts <= o.batch_size; parts++)
        if (o.batch_size % parts == 0) batches.insert({parts, o.batch_size / parts});
    batches.erase(o.batch_size);
    const int64_t tokens =
        micro_batches(o, ranks) * mesh_of(o, 0, ranks).data.ranks * o.batch_size * o.seq_len;
    const std::string keep = o.total_batch_size ? "" : " --total-batch-size " + std::to_string(tokens);
    std::vector<Change> changes;
    for (const int64_t batch : batches) {
        changes.push_back({"--batch-size " + std::to_string(batch) + keep, o});
        changes.back().options.batch_size = batch;
        changes.back().options.total_batch_size = tokens;
    }
    return changes;
}
std::vector<Change> precision_changes(const Options& o) {
    std::vector<Change> changes;
    if (o.resume != "") return changes;  // a checkpoint's are its own
    Change all{"", o};
    const auto change = [&](auto field, auto value, const char* flag) {
        if (all.options.*field == value) return;
        all.options.*field = value;
        all.flags += std::string(all.flags.empty() ? "--" : " --") + flag;
        changes.push_back(all);
    };
    change(&Options::optimizer_state, DType::bf16, "optimizer-state bf16");
    change(&Options::dtype, DType::bf16, "dtype bf16");
    change(&Options::grad_dtype, DType::bf16, "grad-dtype bf16");
    change(&Options::master_weights, false, "master-weights off");
    if (o.lora > 0 || !o.freeze.empty()) change(&Options::frozen_dtype, MatmulDType::fp8, "frozen-dtype fp8");
    return changes;
}

// Bytes of the model's arena on each of `ranks` devices, by a complete plan without allocation: of a stage, and of the largest one.
int64_t planned_bytes(const Config& config, const Options& options, int64_t ranks, int64_t stage) {
    return Model(config, model_options(options, stage * (ranks / options.pp), ranks)).arena.bytes();
}
int64_t planned_bytes(const Config& config, const Options& options, int64_t ranks) {
    int64_t largest = 0;
    for (int64_t stage = 0; stage < options.pp; stage++)
        largest = std::max(largest, planned_bytes(config, options, ranks, stage));
    return largest;
}

// Flags of the smallest change with which the arena has at most `free` bytes: more recomputation, then smaller micro-batches, then
// fewer bytes per parameter, then all of them. Empty: none suffice.
std::string least_change(const Config& config, const Options& options, int64_t ranks, int64_t free) {
    const int64_t replicas = mesh_of(options, 0, ranks).replicas().ranks;
    const std::function<std::vector<Change>(const Options&)> kinds[] = {
        fp8_changes, [&](const Options& o) { return sharding_changes(o, replicas); },
        [&](const Options& o) { return recompute_changes(o, config.L); },
        [&](const Options& o) { return batch_changes(o, ranks); }, precision_changes};
    for (const auto& kind : kinds)
        for (const Change& change : kind(options))
            if (planned_bytes(config, change.options, ranks) <= free) return change.flags;
    Change all{"", options};
    for (const auto& kind : kinds) {
        const std::vector<Change> changes = kind(all.options);
        if (changes.empty()) continue;
        all = {all.flags + (all.flags.empty() ? "" : " ") + changes.back().flags, changes.back().options};
        if (planned_bytes(config, all.options, ranks) <= free) return all.flags;
    }
    return "";
}

}  // namespace

int64_t runtime_bytes(const ModelOptions& options) {
    // For kernels that it loads at their first call, graphs and the matrix products' library; and of NCCL, which makes a
    // communicator's buffers at its first collective. On two H100s a run with three communicators took 0.97 GiB in all.
    constexpr int64_t loaded = int64_t{512} << 20, communicator = int64_t{192} << 20;
    return loaded + options.communicators() * communicator;
}

std::vector<MemoryRow> memory_rows(const Model& model, bool allocated) {
    std::vector<MemoryRow> rows;
    for (const Arena::Row& row : model.arena.rows) {
        auto it = rows.begin();
        while (it != rows.end() && it->group != row.group) ++it;
        if (it == rows.end()) it = rows.insert(it, {row.group, 0, 0});
        it->tensors++;
        it->bytes += row.bytes;
    }
    if (model.context.backend == Backend::host) return rows;
    const DeviceMemoryInfo device = device_memory();
    const int64_t ours = allocated ? model.arena.bytes() : 0;
    rows.push_back({"runtime, other programs", 0, device.total - device.free - ours});
    return rows;
}

Options with_fp8_weights(const Config& config, const Options& options, int64_t ranks) {
    Options chosen = options;
    if (options.matmul_dtype != MatmulDType::fp8 || options.fp8_weights) return chosen;
    chosen.fp8_weights = Fp8Weights::recomputed;
    if (options.zero == 3 && ranks > 1) return chosen;
    chosen.fp8_weights = Fp8Weights::stored;
    // Besides the model: a step's tokens, and the copies of --verify-every.
    constexpr int64_t beside = int64_t{1} << 30;
    const Room room = room_for(options, model_options(options, 0, ranks), computing_context().backend);
    if (planned_bytes(config, chosen, ranks) + beside > room.device.free - room.later)
        chosen.fp8_weights = Fp8Weights::recomputed;
    return chosen;
}

void check_memory(const Model& model, const Options& options) {
    const auto [device, later] = room_for(options, model.options, model.context.backend);
    const int64_t needed = model.arena.bytes() + later;
    if (needed <= device.free) return;
    // The trainer's own tensors in the arena: a step's tokens, whatever the flags.
    const ModelOptions& o = model.options;
    const int64_t ranks = o.sharding.ranks * o.tensor.ranks * o.pipeline.ranks;
    const int64_t beside = model.arena.bytes() - planned_bytes(model.whole, options, ranks, o.pipeline.rank);
    const std::string change = least_change(model.whole, options, ranks, device.free - later - beside);
    fail("memory: the run needs ", gib(needed), ", the device has ", gib(device.free), " free of ",
         gib(device.total),
         change.empty() ? "; no recomputation, batch size or precision makes it fit"
                        : "; it fits with " + change);
}

}  // namespace llamac
