// The flags of a training run, which are also the flat keys of the TOML file that --config names. Flags win
// over the file, the file over the defaults below. llamac/options.py holds the same names, defaults and
// ranges (tests/test_agreement.py); settle() and micro_steps() check more than it does.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "model/recompute.h"

namespace llamac {

// Field batch_size is the flag --batch-size and the key batch-size; options.cpp says what each means and may
// be.
struct Options {
    std::string config;
    bool print_config = false;
    bool list_kernels = false;
    bool dry_run = false;

    std::string model = "tiny";
    std::string init = "auto";  // parse_options puts what it stands for in its place

    std::string train_data = "data/stdlib/train_*.bin";
    std::string val_data = "data/stdlib/val_*.bin";
    std::string tokenizer = "auto";
    int64_t seq_len = 256;
    int64_t batch_size = 8;
    int64_t total_batch_size = 0;
    int64_t seed = 42;

    int64_t steps = 600;
    double lr = 0.003;
    double min_lr_frac = 0.02;
    int64_t warmup_steps = 200;
    std::string schedule = "cosine";
    double weight_decay = 0.1;
    double beta1 = 0.9;
    double beta2 = 0.95;
    double grad_clip = 1.0;

    std::string dtype = "f32";
    std::string grad_dtype = "f32";
    std::string master_weights = "on";
    std::string optimizer_state = "f32";
    std::string recompute = "none";
    std::vector<std::string> kernel;
    std::string tune = "on";
    std::string gemm_cache = "auto";
    std::string graphs = "on";

    std::string out = "out";
    std::string resume = "none";
    int64_t checkpoint_every = 200;
    int64_t keep_checkpoints = 2;
    int64_t log_every = 1;
    int64_t val_every = 100;
    int64_t val_steps = 16;
    int64_t sample_every = 200;
    int64_t sample_tokens = 192;
    double sample_temperature = 0.8;
    int64_t sample_top_k = 50;
    std::string sample_prompt_ids;
    int64_t profile = 0;
};

// Reads the command line and the file that --config names, and checks each value and what they are together.
// Throws Error naming the flag, or the file, line and key. --help prints the flags and ends the program.
Options parse_options(int argc, const char* const* argv);
// The same of a JSON object with a file's keys; what it does not name is as it is by default.
Options parse_options(const nlohmann::json& values);

// A --sample-prompt-ids list: ids with commas between; "": none.
std::vector<int32_t> parse_prompt_ids(const std::string& list);

// Whether a Hugging Face directory has weights, in a format that can be read or not.
bool holds_weights(const std::string& directory);

// Micro-steps of an update: total-batch-size / (batch-size * seq-len * devices). Throws Error where they do
// not divide it.
int64_t micro_steps(const Options& options, int64_t devices);

// The resolved configuration: one line a key; --config and Python's tomllib read it back to the same values.
std::string to_toml(const Options& options);
// The same as JSON, keys as in TOML, in the order of --help.
nlohmann::ordered_json to_json(const Options& options);
// (heading, "key value" pairs) for the table of the configuration.
using Rows = std::vector<std::pair<std::string, std::string>>;
std::vector<std::pair<std::string, Rows>> configuration_rows(const Options& options);

// "f32" or "bf16".
DType storage_type(const std::string& name);
// A --recompute list: none, or parts with commas between: norm, swiglu, qkv, attention, block (= block:1),
// block:K.
Recompute parse_recompute(const std::string& list);

}  // namespace llamac
