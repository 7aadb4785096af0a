#include "checkpoint/resume.h"

#include "checkpoint/checkpoint.h"
#include "core/file.h"
#include "core/folder.h"
#include "run/flag_table.h"

namespace llamac {
namespace {

using nlohmann::json;

// The newest complete checkpoint of a folder, without `except`. Damaged ones that are newer are added to `damaged`.
std::optional<ResumePoint> newest_complete(const std::string& folder, const std::string& except,
                                           std::vector<DamagedName>& damaged, const Ranks& ranks) {
    json names = json::array();
    if (ranks.is_first() && is_folder(folder))
        for (const auto& [step, name] : checkpoints_in(folder))
            if (name != except) names.insert(names.begin(), name);
    for (const json& each : json::parse(ranks.gather("checkpoints", names.dump())[0])) {
        const std::string name = each.get<std::string>(), directory = folder + "/" + name;
        try {
            return ResumePoint{directory, open_checkpoint(directory, ranks), {}};
        } catch (const DamagedCheckpoint& error) {
            damaged.push_back({name, error.what()});
        }
    }
    return {};
}

ResumePoint newest_checkpoint(const std::string& out, const Ranks& ranks) {
    std::vector<DamagedName> damaged;
    auto found = newest_complete(out, "", damaged, ranks);
    if (!found && !damaged.empty())
        fail("--resume auto: expected a complete checkpoint in ", out, ", found ", damaged.size(),
             " damaged: ", damaged[0].reason, "; --resume none starts again at step 0");
    ResumePoint point = found.value_or(ResumePoint{});
    point.damaged = damaged;
    return point;
}

// A named checkpoint is never replaced by another one.
ResumePoint named_checkpoint(const std::string& directory, const Ranks& ranks) {
    try {
        return {directory, open_checkpoint(directory, ranks), {}};
    } catch (const DamagedCheckpoint& error) {
        std::vector<DamagedName> damaged;
        const std::string parent = parent_of(directory);
        const auto other = newest_complete(parent, name_of(directory), damaged, ranks);
        fail(error.what(),
             other ? "; the newest complete checkpoint in its folder is " + other->directory : "");
    }
}

}  // namespace

ResumePoint find_checkpoint(const std::string& out, const std::optional<std::string>& resume,
                            const Ranks& ranks) {
    if (!resume) return newest_checkpoint(out, ranks);
    return resume->empty() ? ResumePoint{} : named_checkpoint(*resume, ranks);
}

void check_resume(const Manifest& m, const std::string& directory, const Options& options,
                  int64_t world_size) {
    if (m.step > options.steps)
        fail(directory, ": expected at most --steps ", options.steps, ", found a checkpoint of step ",
             m.step);
    const Manifest asked = describe_run(options, world_size, m.step);
    const auto same = [&](const char* flag, const auto& made, const auto& now) {
        if (made != now)
            fail(directory, ": was written with --", flag, " ", made, ", expected the same, found ", now);
    };
    same("seed", m.seed, asked.seed);
    same("seq-len", m.seq_len, asked.seq_len);
    same("total-batch-size", m.total_batch_size, asked.total_batch_size);
    same("dtype", m.dtype, asked.dtype);
    same("optimizer-state", m.optimizer_state, asked.optimizer_state);
    same("master-weights", m.master_weights, asked.master_weights);
    // What trains. Checkpoints of earlier versions lack these flags.
    for (const char* flag : {"freeze", "lora", "lora-alpha", "lora-targets", "frozen-dtype"})
        if (const json now = asked.config[flag]; m.config.value(flag, json(now)) != now)
            fail(directory, ": was written with --", flag, " ", m.config[flag].dump(),
                 ", expected the same, found ", now.dump());
}

std::string changed_flags(const Manifest* m, const Options& options, int64_t sequences) {
    const nlohmann::ordered_json now = to_json(options);
    // The run's file has the paths as absolute ones; the checkpoint has them as they were given.
    const json& run = options.run_values;
    std::string text;
    const auto add = [&](const std::string& what, const json& was, const json& is) {
        if (was != is) text += (text.empty() ? "" : ", ") + what + " was " + was.dump() + ", is " + is.dump();
    };
    for (const FlagRow& flag : flags()) {
        const std::string& name = flag.name;
        // Flags that begin or move a run, or have a line of their own.
        if (!flag.in_file || name == "model" || name == "init" || name == "out" || name == "resume" ||
            name == "data-skip")
            continue;
        if (run.contains(name)) add("--" + name, run[name], now[name]);
        const bool as_given = !run.contains(name) || (flag.path.empty() && run[name] == now[name]);
        if (m && as_given && m->config.contains(name)) add("--" + name, m->config[name], now[name]);
    }
    if (m && m->sequences && sequences)
        add("sequences of training data, whose order depends on their number:", m->sequences, sequences);
    return text;
}

}  // namespace llamac
