#include "train/resume.h"

#include <vector>

#include "core/file.h"
#include "core/folder.h"
#include "platform/error.h"
#include "train/checkpoint.h"
#include "train/log.h"

namespace llamac {
namespace {

using nlohmann::json;

// Moves what an earlier run left into the first previous_N that does not exist yet; returns its path.
std::string set_aside(const std::string& out, const std::vector<std::string>& names) {
    std::string previous;
    for (int n = 1; previous.empty() || exists(previous); n++)
        previous = out + "/previous_" + std::to_string(n);
    create_folder(previous);
    for (const std::string& name : names) rename_durably(out + "/" + name, previous + "/" + name);
    return previous;
}

}  // namespace

std::string checkpoint_to_resume(const std::string& out, const std::string& resume) {
    if (resume == "none") return "";
    if (resume != "auto") return resume;
    if (!exists(out)) return "";
    const auto found = checkpoints_in(out);
    return found.empty() ? "" : out + "/" + found.rbegin()->second;
}

void check_resume(const Manifest& m, const std::string& directory, const Options& options,
                  int64_t world_size) {
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
    if (m.step > options.steps)
        fail(directory, ": expected at most --steps ", options.steps, ", found a checkpoint of step ",
             m.step);
}

std::string changed_flags(const Manifest& m, const Options& options, int64_t sequences) {
    const json now = to_json(options);
    std::string text;
    const auto add = [&](const std::string& what, const json& was, const json& is) {
        if (was != is) text += (text.empty() ? "" : ", ") + what + " was " + was.dump() + ", is " + is.dump();
    };
    for (const char* flag :
         {"steps", "lr", "min-lr-frac", "warmup-steps", "schedule", "weight-decay", "beta1", "beta2",
          "grad-clip", "batch-size", "grad-dtype", "train-data", "kernel"})
        if (m.config.contains(flag)) add(std::string("--") + flag, m.config[flag], now[flag]);
    if (m.sequences && sequences)
        add("sequences of training data, whose order hangs on their number:", m.sequences, sequences);
    return text;
}

std::string prepare_output(const std::string& out, const std::string& checkpoint, int64_t step) {
    create_folder(out);
    remove_leftovers(out);
    const bool goes_on = !checkpoint.empty() && same_file(checkpoint + "/..", out);
    std::vector<std::string> aside;
    for (const std::string& name : names_in(out)) {
        const auto its_step = step_of(name);
        const bool its_own =
            name == "log.jsonl" || name == "loss.png" || name == "profile.json" || name == "trace.json";
        if (goes_on ? its_step && *its_step > step : its_step || its_own) aside.push_back(name);
    }
    const std::string previous = aside.empty() ? "" : set_aside(out, aside);
    if (goes_on) truncate_log(out + "/log.jsonl", step);
    if (previous.empty()) return "";
    return (goes_on ? "newer checkpoints are now in " : "an earlier run's log and checkpoints are now in ") +
           previous;
}

}  // namespace llamac
