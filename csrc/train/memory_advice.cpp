#include "train/memory_advice.h"

#include <functional>
#include <set>
#include <vector>

namespace llamac {
namespace {

struct Change {
    std::string flags;
    Options options;
};

// The changes of each kind, the smallest first.
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
// The same tokens per step in more micro-batches.
std::vector<Change> batch_changes(const Options& o, int64_t ranks) {
    std::set<int64_t, std::greater<>> batches;
    for (int64_t parts = 1; parts * parts <= o.batch_size; parts++)
        if (o.batch_size % parts == 0) batches.insert({parts, o.batch_size / parts});
    batches.erase(o.batch_size);
    const int64_t tokens = micro_batches(o, ranks) * ranks * o.batch_size * o.seq_len;
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
    return changes;
}

}  // namespace

int64_t planned_bytes(const Config& config, const Options& options, int64_t ranks) {
    return Model(config, model_options(options, 0, ranks)).arena.bytes();
}

std::string least_change(const Config& config, const Options& options, int64_t ranks, int64_t free) {
    const std::function<std::vector<Change>(const Options&)> kinds[] = {
        fp8_changes, [&](const Options& o) { return sharding_changes(o, ranks); },
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

}  // namespace llamac
