#include "train/trainer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "checkpoint/config_json.h"
#include "checkpoint/resume.h"
#include "checkpoint/weights.h"
#include "core/clock.h"
#include "core/device_memory.h"
#include "core/folder.h"
#include "core/library_gemm.h"
#include "core/words.h"
#include "model/zero.h"
#include "ops/adamw.h"
#include "platform/ranges.h"
#include "train/evaluate.h"
#include "train/memory.h"

namespace llamac {
namespace {

Config model_config(const Options& o, std::string& warning) {
    const Config config =
        o.init == Init::load ? load_config_of_weights(o.model, warning) : load_config(o.model);
    if (o.seq_len > config.max_context)
        fail("--seq-len ", o.seq_len, ": the model's longest sequence (", config.max_context_field(), ") is ",
             config.max_context);
    if (!config.causal && !o.eval_tasks.empty())
        fail("--eval-tasks ", o.eval_tasks, ": expected a causal model, found one of type ",
             config.model_type);
    return config;
}

// The file of timed matrix products; "": none.
std::string gemm_cache(const Options& o) {
    if (o.gemm_cache) return *o.gemm_cache;
    const char *cache = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
    if (cache && *cache) return std::string(cache) + "/llamac/gemm.json";
    return home && *home ? std::string(home) + "/.cache/llamac/gemm.json" : "";
}

// Takes the choices in the file. Returns "", or a line with the reason why they are not taken. A malformed file is an error if
// the user names it; our own is replaced.
std::string take_gemm_choices(GemmAlgorithms& gemms, const Options& o) {
    const std::string file = gemm_cache(o);
    if (file.empty()) return "";
    try {
        const std::string why = gemms.use(read_gemm_cache(file));
        return why.empty() ? "" : file + ": the matrix products' choices are " + why + "; tuning them again";
    } catch (const Error& error) {
        if (o.gemm_cache) throw;
        return std::string(error.what()) + "; tuning the matrix products again";
    }
}
// A failure is no reason to end a run: the products are timed again next time.
void keep_gemm_choices(const GemmAlgorithms& gemms, const Options& o) {
    const std::string file = gemm_cache(o);
    try {
        if (!file.empty()) add_to_gemm_cache(file, gemms.choices());
    } catch (const Error& error) {
        std::fprintf(stderr, "train_llama3: %s; the matrix products' choices are not kept\n", error.what());
    }
}

// The files of a checkpoint that have this role, in the order of the ranks that wrote them.
std::vector<std::string> files_of(const Manifest& manifest, const std::string& role,
                                  const std::string& checkpoint) {
    std::map<int64_t, std::string> paths;
    for (const FileRecord& file : manifest.files)
        if (file.role == role) paths[file.rank.value_or(0)] = checkpoint + "/" + file.name;
    std::vector<std::string> ordered;
    for (const auto& [rank, path] : paths) ordered.push_back(path);
    return ordered;
}

// The rows of a micro-batch that an encoder's head computes, unless more tokens are masked: their mean number plus six standard
// deviations, for which a whole word counts as four tokens. 0: all rows, where these are more than half of them.
int64_t predicted_rows(const Options& o) {
    constexpr int64_t tile = 128;
    const double p = o.mlm_probability, pieces = o.mlm_whole_words ? 4 : 1;
    const int64_t rows = o.batch_size * o.seq_len;
    const double mean = static_cast<double>(rows) * p, most = mean + 6 * std::sqrt(mean * (1 - p) * pieces);
    const int64_t found = (static_cast<int64_t>(most) / tile + 1) * tile;
    return found <= rows / 2 ? found : 0;
}

// Refuses kernels that cannot be verified before it is known whether they take the model's shapes.
ModelOptions verifiable_model_options(const Config& config, const Options& o, const Ranks& ranks) {
    Options chosen = with_fp8_weights(config, o, ranks.count);
    // The rank with the least free memory decides for all.
    const bool stored = chosen.fp8_weights == Fp8Weights::stored;
    for (const double each : ranks.gather("fp8 weights", stored ? 1 : 0))
        if (each == 0) chosen.fp8_weights = Fp8Weights::recomputed;
    ModelOptions found = model_options(chosen, ranks.own, ranks.count);
    if (!config.causal) {
        found.cache = {};  // no samples
        found.predicted_rows = predicted_rows(o);
    }
    return found;
}

void warn_of_changes(Trainer& t, const Manifest* manifest) {
    const std::string changed =
        changed_flags(manifest, t.options, t.data.train ? t.data.train->sequences : 0);
    if (!changed.empty())
        t.warn((manifest ? t.resumed_from : t.options.run_config) +
               ": continues with other settings: " + changed);
}

// A plan needs no files yet: without those that are missing.
Options without_missing_files(const Options& o, std::string& warnings) {
    Options found = o;
    const auto leave_out = [&](const char* flag, const std::string& value) {
        warnings += (warnings.empty() ? "--" : "\n--") + std::string(flag) + " " + value +
                    ": no such file; planned without it";
    };
    for (const auto& [flag, data] :
         {std::pair{"train-data", &found.train_data}, {"val-data", &found.val_data}})
        if (!data->empty() && !has_files(*data)) {
            leave_out(flag, *data);
            data->clear();
        }
    if (found.tokenizer && !found.tokenizer->empty() && !exists(*found.tokenizer)) {
        leave_out("tokenizer", *found.tokenizer);
        found.tokenizer = "";
    }
    for (const std::string& file : split_list(o.eval_tasks))
        if (!exists(file)) {
            leave_out("eval-tasks", file);
            found.eval_tasks.clear();
        }
    if (found.train_data.empty()) found.document_mask = false;  // whose documents need a tokenizer
    return found;
}

// What a resumed run does not find may be named in its own file alone.
template <class Call>
auto naming_run_config(const Options& o, const Call& call) {
    try {
        return call();
    } catch (const Error& error) {
        if (o.run_config.empty()) throw;
        fail(error.what(), "; flags that the command line does not have are from ", o.run_config);
    }
}

// Where --out has no checkpoint yet, --resume auto begins again as the run began.
ResumePoint find_resume_point(const Options& o, const Ranks& ranks) {
    const ResumePoint found = find_checkpoint(o.out, o.resume, ranks);
    if (!found.directory.empty() || o.resume || o.run_values.empty()) return found;
    const std::string first = o.run_values["resume"];
    return first == "auto" || first == "none" ? found : find_checkpoint(o.out, first, ranks);
}

Readers readers_of(Trainer& t) {
    return {t.ranks, t.model.ranks, t.model.replicas.get()};
}

// Weights by --model and --init.
void load_base(Trainer& t) {
    const Options& o = t.options;
    const auto seed = static_cast<uint64_t>(o.seed);
    if (o.init == Init::load) {
        t.warn(load_weights(t.model.parameters, o.model, readers_of(t)));
        return initialize_adapters(t.model.context, t.model.parameters, seed);
    }
    std::error_code none;  // a path without access is no directory
    if (std::filesystem::is_directory(o.model, none) && find_weights(o.model).empty())
        t.warn("--model " + o.model + ": the directory has no weights; the initial weights are random");
    if (t.model.parameters.frozen.data || t.model.parameters.codes.data)
        t.warn("the frozen weights are random, and stay so");
    initialize(t.model.context, t.model.parameters, t.config, seed);
}

void set_initial_weights(Trainer& t) {
    if (!t.options.resume)
        t.warn("--resume auto: no checkpoint in " + t.options.out + ": the run begins at step 0");
    warn_of_changes(t, nullptr);
    load_base(t);
    if (t.model.lora) hash_base(t.model);
}

// The weights that the adapters of a checkpoint were trained beside, which it does not hold.
void resume_adapters(Trainer& t, const std::string& states) {
    load_base(t);
    load_adapters(t.model.parameters, t.resumed_from, readers_of(t), false);
    hash_base(t.model);
    std::array<double, 4> found{}, expected{};
    CHECK(hipStreamSynchronize(t.model.context.stream));
    copy_bytes(found.data(), t.model.lora->base.data, sizeof found);
    SafetensorsFile(states).read(base_name, make_tensor(expected.data(), DType::f64, {4}));
    const std::array<double, 4> unknown{};
    if (found == unknown || expected == unknown)
        t.warn(t.resumed_from +
               ": its base is not compared with --model, as one of the runs has --tp or --pp");
    else if (found != expected)
        fail("--model ", t.options.model, ": expected the weights beside which the adapters of ",
             t.resumed_from, " were trained, found others");
}

// The data continues at the checkpoint's position, or after the sequences that --data-skip leaves out.
void resume_data(Trainer& t, const Manifest& manifest) {
    const int64_t before = manifest.data_position - manifest.step * sequences_per_step(manifest);
    constexpr int64_t max_ahead = int64_t{1} << 53;
    if (before < 0 || before > max_ahead)
        fail(t.resumed_from, "/manifest.json: data_position: expected ", manifest.data_position - before,
             ", the number that its steps have drawn, or up to 2^53 more, found ", manifest.data_position);
    if (t.data_skip > 0 && t.data_skip < before)
        fail("--data-skip ", t.data_skip, ": expected at least ", before, ", which ", t.resumed_from,
             " has left out; without the flag they stay left out");
    if (t.data_skip > before)
        t.warn(t.resumed_from + ": the data continues " + std::to_string(t.data_skip - before) +
               " sequences after the checkpoint's");
    t.data_skip = std::max(t.data_skip, before);
}

// The fp8 options of a run of version 0.1, which had no fnuz types.
Fp8Options saved_fp8(const Manifest& manifest) {
    const auto value = [&](const char* flag) {
        return manifest.config.contains(flag) ? manifest.config[flag] : nlohmann::json();
    };
    const auto blocks = [&](const char* flag) {
        return value(flag).is_number_integer() ? value(flag).get<int64_t>() : 0;
    };
    Fp8Options saved;
    if (value("fp8-gradients") == "e4m3") saved.gradients = saved.values;
    saved.keep_first = blocks("fp8-keep-first"), saved.keep_last = blocks("fp8-keep-last");
    return saved;
}

// A fixed scale is the flag's.
void load_loss_scale(Trainer& t, const std::string& path) {
    for (const NamedTensor& each : loss_scale_tensors(t.model)) {
        char bytes[8];
        Tensor value = each.tensor;
        value.data = bytes;
        SafetensorsFile(path).read(each.name, value);
        if (each.tensor.dtype == DType::i32 || t.options.loss_scale == 0)
            copy_bytes(each.tensor.data, bytes, value.bytes());
    }
}

void resume(Trainer& t, const Manifest& manifest) {
    check_resume(manifest, t.resumed_from, t.options, t.ranks.count);
    const DType dtype = t.model.options.precision.weights;
    Config saved = load_config(t.resumed_from);
    saved.pad = t.config.pad;  // checkpoints of earlier versions lack it
    if (config_json(saved, dtype) != config_json(t.config, dtype))
        fail(t.resumed_from, "/config.json: is not the model that --model ", t.options.model, " means");
    if (const std::string not_taken = t.model.gemms.use(manifest.gemms); !not_taken.empty())
        t.warn(t.resumed_from + ": the matrix products' choices are " + not_taken + ": other bits");
    warn_of_changes(t, &manifest);
    resume_data(t, manifest);
    const std::vector<std::string> states = files_of(manifest, "optimizer", t.resumed_from);
    if (t.model.lora)
        resume_adapters(t, states[0]);
    else  // master weights are among the states
        load_weights(t.model.parameters, t.resumed_from, readers_of(t), false);
    load_optimizer(t.model.parameters, states, readers_of(t));
    if (manifest.step > 0) load_fp8(t.model, states[0], saved_fp8(manifest));
    load_loss_scale(t, states[0]);
    t.step = manifest.step;
}

}  // namespace

Trainer::Trainer(const Options& o, std::optional<int64_t> ahead, const Ranks& among)
    : options(o),
      config(naming_run_config(o, [&] { return model_config(o, warnings); })),
      ranks(among),
      mesh(mesh_of(o, ranks.own, ranks.count)),
      accumulation(micro_batches(o, ranks.count)),
      data_skip(o.data_skip),
      data(naming_run_config(
          o,
          [&] { return RunData(o.dry_run ? without_missing_files(o, warnings) : o, config, accumulation); })),
      model(config, verifiable_model_options(config, o, ranks), ranks.communicator.get()),
      max_in_flight(ahead.value_or(model.context.backend == Backend::device ? 1 : 0)),
      batches(model, max_in_flight + 1, accumulation,
              data.tokenizer ? data.tokenizer->marks : DocumentMarks{}),
      replays(model.options.graphs),
      schedule(o.pp > 1 ? pipeline_schedule(mesh.pipeline, accumulation, o.pp_chunks)
                        : std::vector<PipelineStep>()) {
    if (o.sample_every > 0 && config.causal)
        sample_prompt(*this);  // refuses a token that the model lacks before the first step
    if (data.train)
        for (const std::string& line : run_warnings(o, config, data, tokens_per_step() / o.seq_len))
            warn(line);
    if (!o.dry_run && ranks.on_this_host() % o.tp != 0)
        warn("--tp " + std::to_string(o.tp) + ": some of its axes leave their host, which has " +
             std::to_string(ranks.on_this_host()) + " ranks: every layer waits for the network");
    if (accumulation < o.pp)
        warn("--pp " + std::to_string(o.pp) + ": the step has " + std::to_string(accumulation) +
             " micro-batches, fewer than stages: stages wait most of the time; --total-batch-size sets the "
             "number");
    warn(without_gemm_library());
    if (!o.graphs && !replays)
        warn(
            "--graphs auto: on AMD every kernel is launched directly, as nobody has run llamac's graphs "
            "there; "
            "--graphs on replays them (docs/rocm.md lists the known problems)");
    if (o.verify_every > 0) verifier.emplace(model, accumulation, adamw(), static_cast<uint64_t>(o.seed));
    if (o.dry_run) return;
    check_memory(model, o);  // before the host's memory is taken, too
    model.allocate();
    batches.allocate();
    for (int64_t i = 0; i <= max_in_flight; i++)
        buffers.emplace_back(accumulation * model.options.rows(), verifier ? verifier->hash_count() : 0,
                             model.fp8 ? model.fp8->slots : 0);
    while (ends.size() <= buffers.size()) ends.emplace_back();
    warn(take_gemm_choices(model.gemms, o));
    const Clock::time_point begin = Clock::now();
    const ResumePoint point = find_resume_point(o, ranks);
    resumed_from = point.directory;
    for (const DamagedName& each : point.damaged) {
        damaged.push_back(each.name);
        warn("--resume auto: " + each.name + " is damaged: " + each.reason);
    }
    ranks.compare(options, facts());  // before ranks send weights to one another
    if (point.manifest)
        resume(*this, *point.manifest);
    else
        set_initial_weights(*this);
    start.weights = seconds_since(begin);
    finished = step;
    tokenizer_files = read_tokenizer_files(o.model, data.tokenizer ? parent_of(data.tokenizer->path) : "",
                                           data.train && data.train->is_packed);

    agree_with_ranks();
}

void Trainer::warn(const std::string& line) {
    if (!line.empty()) warnings += (warnings.empty() ? "" : "\n") + line;
}

std::vector<std::pair<std::string, std::string>> Trainer::facts() const {
    const auto describe = [](const std::optional<Loader>& loader) {
        if (!loader) return std::string("none");
        return std::to_string(loader->tokens) + " tokens in " + std::to_string(loader->shards.size()) +
               " files";
    };
    return {{"--model", config_json(config, model.options.precision.weights)},
            {"--train-data", describe(data.train)},
            {"--val-data", describe(data.val)},
            {"--eval-tasks", checksums(data.questions)},
            {"--resume", resumed_from.empty() ? "no checkpoint" : resumed_from}};
}

AdamW Trainer::adamw() const {
    return {options.beta1, options.beta2, 1e-8, options.weight_decay, options.grad_clip};
}

bool Trainer::is_verified(int64_t number) const {
    return verifier && number % options.verify_every == 0;
}

void Trainer::launch(CapturedGraph& r, const std::function<void()>& work) {
    const bool settled = is_settled(model);
    if (replays && r.settled && settled && !model.context.observer) {
        const Clock::time_point begin = Clock::now();
        if (!r.graph) r.graph.emplace(model.stream.handle, work);
        start.graphs += seconds_since(begin);
        return r.graph->replay();
    }
    work();
    r.launched = true;
    r.settled = settled;
}

const Event& Trainer::end_of(int64_t steps) const {
    return ends[static_cast<size_t>(steps) % ends.size()];
}

void Trainer::agree_with_ranks() {
    // Stages have other products, at other times: agree_on_products().
    if (ranks.count == 1 || !schedule.empty()) return;
    model.gemms.gather = [this](const std::string& own) { return ranks.gather("GEMM choice", own); };
    warn(take_first_ranks_choices(model.gemms));
}

void Trainer::agree_on_products() {
    if (schedule.empty() || ranks.count == 1) return;
    const std::string why = take_common_choices(
        model.gemms, [this](const std::string& own) { return ranks.gather("GEMM choice", own); });
    if (!why.empty() && ranks.is_first()) std::fprintf(stderr, "train_llama3: %s\n", why.c_str());
    CHECK(hipStreamSynchronize(model.stream.handle));
    passes.clear();
}

double Trainer::flops_per_token() const {
    const double all = llamac::flops_per_token(model.parameters, config, options.seq_len);
    const int64_t rows = model.options.predicted_rows, N = options.batch_size * options.seq_len;
    if (!rows) return all;
    const double per_weight = model.parameters.head.trains ? 6 : 4;
    return all - per_weight * static_cast<double>(config.V * config.C * (N - rows)) / static_cast<double>(N);
}

double Trainer::sum_over_data(const char* kind, double number) const {
    const std::vector<double> numbers = ranks.gather(kind, number);
    double sum = 0;
    for (int64_t rank = 0; rank < mesh.data.ranks; rank++) sum += numbers[mesh.rank_of(0, 0, rank)];
    return sum;
}

double Trainer::mean_over_context(const char* kind, double number) const {
    if (mesh.context.ranks == 1) return number;
    const std::vector<double> numbers = ranks.gather(kind, number);
    double sum = 0;
    for (int64_t rank = 0; rank < mesh.context.ranks; rank++)
        sum += numbers[mesh.rank_of(0, rank, mesh.data.rank)];
    return sum / static_cast<double>(mesh.context.ranks);
}

void Trainer::fill_batches(const Fill& fill) {
    ranks.together("training data", [&] {
        for (int64_t micro = 0; micro < accumulation; micro++) {
            const HostBatch batch = batches.host(step, micro);
            if (fill)
                fill(micro, batch.tokens, batch.targets);
            else
                data.train->micro_batch(step, micro, mesh.data.rank, mesh.data.ranks, batch.tokens,
                                        batch.targets, data_skip, batch.first);
            if (fill || !data.train->is_packed)
                batches.find_documents(batch, options.batch_size, options.seq_len);
        }
    });
}

void Trainer::wait_for_device() {
    if (micro_batches_queued >= 2) micro_ends[micro_batches_queued % 2].wait();
    if (between) between();
}

void Trainer::queue_micro_batch(int64_t micro, StepBuffers& b, std::optional<int> pass) {
    batches.use(step, micro);
    // With one rank, the last micro-batch is like the others.
    const bool first = micro == 0, last = ranks.count == 1 || micro == accumulation - 1;
    launch(passes[{last, first, model.activations.predicted.data != nullptr}],
           [=, this] { forward_backward(model, first, last); });
    end_micro_batch(micro, b, pass);
}

void Trainer::end_micro_batch(int64_t micro, StepBuffers& b, std::optional<int> pass) {
    const Tensor& losses = model.activations.losses;
    if (model.parameters.holds_head())
        copy_bytes_async(model.context, b.losses.data + micro * model.options.rows(), losses.data,
                         losses.bytes());
    micro_ends[micro_batches_queued++ % 2].record(model.stream.handle);
    if (pass) verifier->end_micro_batch(*pass, micro);
}

void Trainer::queue_stage(const PipelinePass& work, StepBuffers& b, std::optional<int> pass) {
    const int64_t micro = work.micro_batch, slot = micro % model.options.micro_batches;
    const bool first = micro == 0, last = micro == accumulation - 1;
    const Range range(work.backward ? "backward of micro-batch" : "forward of micro-batch", micro);
    use_micro_batch(model, slot);
    CapturedGraph& captured = passes[{last && work.backward, first, slot, work.chunk, work.backward}];
    if (!work.backward) {
        if (work.chunk == 0 && pass != 1) batches.copy(step, micro);
        if (work.chunk == 0) batches.use(step, micro);
        return launch(captured, [=, this] { forward_layers(model, first, work.chunk); });
    }
    launch(captured, [=, this] { backward_layers(model, first, last, work.chunk); });
    if (work.chunk != options.pp_chunks - 1) return;  // of which the last one may have the head
    if (micro_batches_queued >= 2) micro_ends[micro_batches_queued % 2].wait();
    end_micro_batch(micro, b, pass);
    if (written) written();
}

void Trainer::queue_pipeline(StepBuffers& b, std::optional<int> pass) {
    const int64_t ticks_per_micro_batch = 2 * options.pp_chunks;
    for (size_t tick = 0; tick < schedule.size(); tick++) {
        // What one stage has sent before a tick, the other one has received.
        if (between && static_cast<int64_t>(tick) % ticks_per_micro_batch == 0) between();
        if (schedule[tick].pass) queue_stage(*schedule[tick].pass, b, pass);
        transfer(model, schedule[tick].transfers);
    }
    use_micro_batch(model, 0);
    finish_gradients(model);
}

void Trainer::queue_passes(StepBuffers& b, std::optional<int> pass) {
    if (!schedule.empty()) return queue_pipeline(b, pass);
    for (int64_t micro = 0; micro < accumulation; micro++) {
        const Range range("micro-batch", micro);
        wait_for_device();
        if (pass != 1) batches.copy(step, micro);
        queue_micro_batch(micro, b, pass);
    }
}

void Trainer::queue_micro_batches(StepBuffers& b, bool verified) {
    try {
        if (!verified) return queue_passes(b, {});
        queue_passes(b, 0);
        verifier->end_first_pass();
        clear_saturated(model);
        queue_passes(b, 1);
    } catch (...) {
        // The step may be started again: in the same buffers, which micro-batches of this start may still read.
        if (micro_batches_queued > 0) micro_ends[(micro_batches_queued - 1) % 2].wait();
        if (!schedule.empty()) use_micro_batch(model, 0);
        throw;
    }
}

void Trainer::start_step(const Fill& fill, std::optional<int64_t> counted) {
    CHECK(in_flight() <= max_in_flight);
    fill_batches(fill);
    // If no target of the step counts, its loss and gradients are 0 for any scale.
    if (!fill && (data.train->is_packed || data.train->masking))
        counted = std::max<int64_t>(sum_over_data("targets", batches.counted_targets(step)), 1);
    StepBuffers& b = buffers_of(step);
    // The first step has all products that are worth a timing; samples have others at every length.
    const bool first = !optimizer.launched;
    const GemmTuning tuning(model.gemms, first && options.tune);
    const Range step_range("step", step + 1);
    if (in_flight() == 0) end_of(step).record(model.stream.handle);
    const bool verified = is_verified(step + 1);
    if (verified) verifier->begin();
    clear_saturated(model);
    CHECK(!counted || *counted > 0);
    b.of_counted = counted ? static_cast<double>(tokens_per_step()) / static_cast<double>(*counted) : 1;
    follow_loss_scale(model, b.of_counted);
    const double of_mean = 1.0 / static_cast<double>(accumulation * mesh.data.ranks) * b.of_counted;
    b.dloss.data[0] = static_cast<float>(of_mean / static_cast<double>(options.batch_size * options.seq_len));
    set_dloss(model, b.dloss.data);
    queue_micro_batches(b, verified);
    const Range range("optimizer");
    b.lr.data[0] = static_cast<float>(learning_rate(options, step + 1));
    b.step.data[0] = static_cast<int32_t>(step + 1);
    set_step(model, b.lr.data, b.step.data);
    if (model.loss_scale.data)  // which the step may change
        copy_bytes_async(model.context, b.loss_scale.data, model.loss_scale.data, sizeof(float));
    if (verified) verifier->repeat_optimizer_step();
    launch(optimizer, [this] { optimizer_step(model, adamw(), static_cast<uint64_t>(options.seed)); });
    set_stale(model, true);
    copy_bytes_async(model.context, b.squares.data, model.squares.data, sizeof(double));
    if (model.loss_squares.data)
        copy_bytes_async(model.context, b.squares.data + 1, model.loss_squares.data, sizeof(double));
    copy_saturated(model, b.saturated.data);
    if (verified) verifier->end(b.hashes.data);
    end_of(step + 1).record(model.stream.handle);
    step++;
    if (first) agree_on_products();
    if (first) start.tuning = model.gemms.tuning_seconds;
    if (first && ranks.is_first()) keep_gemm_choices(model.gemms, options);
}

// Below, gradients are not what overflows.
constexpr double least_loss_scale = 0x1p-14;

StepResult Trainer::finish_step() {
    CHECK(in_flight() > 0);
    const StepBuffers& b = buffers_of(finished);
    const Event &begin = end_of(finished), &end = end_of(finished + 1);
    end.wait();
    const double ms = end.ms_since(begin);
    finished++;
    if (is_verified(finished))
        ranks.together("verification", [&] {
            const std::string wrong = verifier->difference(b.hashes.data);
            if (wrong.empty()) return;
            CHECK(hipDeviceSynchronize());  // the memory of later steps goes with the trainer
            fail("step ", finished, ": ", wrong);
        });
    const bool skipped = model.loss_squares.data && is_skipped(b.squares.data[0], b.squares.data + 1);
    const bool scaled = model.loss_scale.data;
    const double scale = scaled ? b.loss_scale.data[0] : 0;
    if (skipped && scaled)
        ranks.together("loss scale", [&] {
            if (options.loss_scale == 0 && scale > least_loss_scale) return;
            CHECK(hipDeviceSynchronize());  // as above
            fail("step ", finished,
                 ": expected finite losses and gradients, found an overflow of fp16 at a loss scale of ",
                 scale,
                 options.loss_scale == 0 ? ": the run has diverged"
                                         : "; --loss-scale 0 reduces it where a step overflows");
        });
    const double own = mean(b.losses.data, accumulation * model.options.rows()),
                 loss = sum_over_data("loss", mean_over_context("loss", own)) /
                        static_cast<double>(mesh.data.ranks);
    return {finished,
            loss * b.of_counted,
            grad_norm(b.squares.data[0], scaled ? scale : 1),
            learning_rate(options, finished),
            ms,
            skipped,
            scale,
            saturated_tensors(b.saturated.data)};
}

std::vector<Saturated> Trainer::saturated_tensors(const int32_t* counts) const {
    if (!model.fp8) return {};
    std::string own;
    for (int64_t slot = 0; slot < model.fp8->slots; slot++)
        if (counts[slot] != 0)
            own += std::to_string(slot) + " " + std::to_string(static_cast<uint32_t>(counts[slot])) + " ";
    std::map<int64_t, int64_t> all_ranks;
    for (const std::string& text : ranks.gather("saturated", own)) {
        std::istringstream numbers(text);
        for (int64_t slot = 0, count = 0; numbers >> slot >> count;) all_ranks[slot] += count;
    }
    const int64_t rows = model.options.rows(), passes = accumulation * mesh.ranks_per_stage();
    std::vector<Saturated> tensors;
    for (const auto& [slot, count] : all_ranks)
        tensors.push_back({slot_name(config, slot), count,
                           passes * slot_elements(model.config, model.parameters, slot, rows)});
    return tensors;
}

}  // namespace llamac
