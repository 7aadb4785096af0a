// The flags of a training run, which are also the keys of the TOML file that --config names. Flags override the file, and the file
// the defaults. configs/tables/flags.toml has their rules; resolve(), micro_batches() and shard_group() check combinations.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "model/options.h"

namespace llamac {

enum class Init : uint8_t { random, load };
enum class MatmulDType : uint8_t { storage, fp8 };
// wsd: warm-up, stable, decay over the last fifth.
enum class ScheduleShape : uint8_t { cosine, linear, constant, wsd };
enum class Fp8Gradients : uint8_t { e5m2, e4m3 };

struct MemorySize {
    int64_t bytes = 0;
};

// A member per flag: batch_size is the flag --batch-size and the key batch-size. The value auto is std::nullopt; the value
// none of a path is "". To add a flag, add a row to configs/tables/flags.toml, a member, and its name in flag_table.cpp.
struct Options {
    // Configuration
    std::string config;
    bool print_config;
    std::string list_kernels;  // an operation, all, or ""
    bool dry_run;
    MemorySize device_memory;
    std::string device;
    int64_t devices_per_node;

    // Model
    std::string model;
    std::optional<Init> init;
    std::string freeze;
    int64_t lora;
    double lora_alpha;
    std::string lora_targets;
    MatmulDType frozen_dtype;

    // Data
    std::string train_data, val_data;
    std::optional<std::string> tokenizer;
    bool document_mask;
    double mlm_probability;
    bool mlm_whole_words;
    int64_t mask_token;
    int64_t seq_len, batch_size, total_batch_size, seed, data_skip;

    // Optimization
    int64_t steps;
    double lr, min_lr_frac;
    int64_t warmup_steps;
    ScheduleShape schedule;
    double weight_decay, beta1, beta2, grad_clip;
    int64_t skip_nonfinite, verify_every;

    // Precision and memory
    DType dtype, grad_dtype;
    double loss_scale;
    bool master_weights;
    DType optimizer_state;
    MatmulDType matmul_dtype;
    Fp8Scaling fp8_recipe;
    Fp8Gradients fp8_gradients;
    std::optional<Fp8Weights> fp8_weights;
    bool fp8_head;
    int64_t fp8_keep_first, fp8_keep_last;
    Recompute recompute;
    std::vector<std::string> kernel;
    bool tune;
    std::optional<std::string> gemm_cache;
    std::optional<bool> graphs;

    // Several devices
    int64_t devices, tp, cp, pp, pp_chunks, zero, shard_group;
    std::optional<DType> reduce_dtype;
    double collective_timeout;

    // Output
    std::string out;
    std::optional<std::string> resume;
    int64_t checkpoint_every, keep_checkpoints;
    std::optional<bool> checkpoint_async;
    std::optional<int64_t> log_every;
    double watchdog;
    int64_t val_every, val_steps, eval_every;
    std::string eval_tasks;
    int64_t sample_every, sample_tokens;
    double sample_temperature;
    int64_t sample_top_k;
    std::vector<int32_t> sample_prompt_ids;
    int64_t profile;

    // The configuration of the run that --resume continues: its file, "" if it has none, and the values in it.
    std::string run_config;
    nlohmann::ordered_json run_values;

    Options();  // the defaults of the table
};

// Reads the command line and the file that --config names, or, without --config, the run_config() of the run that --resume
// continues, and checks each value and their combinations. Throws Error naming the flag, or the file, line and key.
// --help prints the flags and ends the program.
Options parse_options(int argc, const char* const* argv);
// A JSON object with a file's keys; `where` begins the messages about it.
struct OptionValues {
    std::string where;
    nlohmann::json values;
};
// The same for a file ("": none; nullopt: none but the run_config() of the run that the last object asks to resume) and
// objects, each of which overrides the values before it.
Options parse_options(const std::optional<std::string>& config, const std::vector<OptionValues>& layers);

// The options of the model of one rank. fp8_weights of auto means recomputed.
ModelOptions model_options(const Options& options, int64_t rank = 0, int64_t ranks = 1);

// The mesh of so many ranks. Throws Error if --tp times --cp times --pp does not divide their number.
Mesh mesh_of(const Options& options, int64_t rank, int64_t ranks);

// Micro-batches per step: total-batch-size / (batch-size * seq-len * data-parallel devices). Throws Error if that is not an
// integer.
int64_t micro_batches(const Options& options, int64_t devices);

// Ranks per sharding group: --shard-group, or all `ranks` of Mesh::replicas(). Throws Error if it does not divide their number.
int64_t shard_group(const Options& options, int64_t ranks);

// The resolved configuration, one line per key; --config and Python's tomllib read back the same values.
std::string to_toml(const Options& options);
// OUT/config.toml, from which --resume continues the run: to_toml() with absolute paths, so that the working directory of the
// resumed run does not matter.
constexpr const char* run_config_name = "config.toml";
std::string run_config(const Options& options);
// A word of a command as a shell reads it, quoted where that is needed.
std::string shell_word(const std::string& word);
// The command that continues the run.
std::string resume_command(const std::string& program, const Options& options);
// The same as JSON, keys as in TOML, in the order of --help.
nlohmann::ordered_json to_json(const Options& options);
// (heading, "key value" pairs) for the table of the configuration.
using Rows = std::vector<std::pair<std::string, std::string>>;
std::vector<std::pair<std::string, Rows>> configuration_rows(const Options& options);

// A --recompute list: none, or parts separated by commas: norm, swiglu, qkv, attention, block (= block:1), block:K.
Recompute parse_recompute(const std::string& list);
std::string text_of(const Recompute& recompute);

}  // namespace llamac
