// The flags of a training run, which are also the keys of the TOML file that --config names. Flags override the file,
// and the file overrides the defaults. The table is configs/tables/flags.toml; llamac/training/options.py reads it, too.
// resolve(), micro_batches() and shard_group() check combinations of values.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "model/recompute.h"

namespace llamac {

// A member for each flag of configs/tables/flags.toml, with its default: batch_size is the flag --batch-size and the
// key batch-size. Text is std::string, an integer int64_t, a number double, a switch bool, a list a vector of strings.
struct Options {
#include "run/flag_members.inc"
};

// Reads the command line and the file that --config names, and checks each value and what they are together.
// Throws Error naming the flag, or the file, line and key. --help prints the flags and ends the program.
Options parse_options(int argc, const char* const* argv);
// A JSON object with a file's keys; `where` begins the messages about it.
struct OptionValues {
    std::string where;
    nlohmann::json values;
};
// The same of a file ("": none) and of objects, each of which overrides the values before it.
Options parse_options(const std::string& config, const std::vector<OptionValues>& layers);

// A --sample-prompt-ids list: ids separated by commas; "": none.
std::vector<int32_t> parse_prompt_ids(const std::string& list);

// Micro-batches of a step: total-batch-size / (batch-size * seq-len * devices). Throws Error where they do
// not divide it.
int64_t micro_batches(const Options& options, int64_t devices);

// Ranks that share with one another: --shard-group, or all of them. Throws Error where it does not divide their number.
int64_t shard_group(const Options& options, int64_t ranks);

// The resolved configuration: one line a key; --config and Python's tomllib read it back to the same values.
std::string to_toml(const Options& options);
// The same as JSON, keys as in TOML, in the order of --help.
nlohmann::ordered_json to_json(const Options& options);
// (heading, "key value" pairs) for the table of the configuration.
using Rows = std::vector<std::pair<std::string, std::string>>;
std::vector<std::pair<std::string, Rows>> configuration_rows(const Options& options);

// The bytes of a --device-memory: a number and MiB or GiB. "": 0, the memory of this machine's device.
int64_t parse_device_memory(const std::string& size);

// A --recompute list: none, or parts separated by commas: norm, swiglu, qkv, attention, block (= block:1),
// block:K.
Recompute parse_recompute(const std::string& list);

}  // namespace llamac
