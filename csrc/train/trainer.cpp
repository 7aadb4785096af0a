#include "train/trainer.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "checkpoint/config_json.h"
#include "checkpoint/resume.h"
#include "checkpoint/weights.h"
#include "core/library_gemm.h"
#include "ops/adamw.h"
#include "platform/ranges.h"
#include "train/memory.h"
#include "train/warnings.h"

namespace llamac {
namespace {

Config model_config(const Options& o, std::string& warning) {
    const Config config =
        o.init == Init::load ? load_config_of_weights(o.model, warning) : load_config(o.model);
    if (o.seq_len > config.max_context)
        fail("--seq-len ", o.seq_len, ": the model's longest sequence (max_position_embeddings) is ",
             config.max_context);
    return config;
}

Loader load_data(const std::string& pattern, const Options& o, const Config& config, int64_t accumulation) {
    return Loader(pattern, o.seq_len, config.V, o.batch_size, accumulation, static_cast<uint64_t>(o.seed));
}

std::optional<Loader> load_training_data(const Options& o, const Config& config, int64_t accumulation) {
    if (o.train_data.empty()) return std::nullopt;
    return load_data(o.train_data, o, config, accumulation);
}

std::optional<Tokenizer> load_tokenizer(const Options& o, const std::optional<Loader>& train) {
    std::optional<Tokenizer> found;
    if (train)
        found = find_tokenizer(o.tokenizer, *train);
    else if (o.tokenizer && !o.tokenizer->empty())
        found.emplace(*o.tokenizer);
    if (found) check_tokenizer_of_model(o.model, *found);
    return found;
}

// What says whose ids the run is of; 0: nothing does.
uint64_t hash_of_ids(const std::optional<Loader>& train, const std::optional<Tokenizer>& tokenizer) {
    return tokenizer ? tokenizer->hash : train ? train->shards[0].tokenizer_hash : 0;
}

// Where documents begin is what the tokenizer has marked in the shards, but for packed ones.
void check_documents(const Options& o, const Config& config, const std::optional<Loader>& train,
                     const std::optional<Loader>& val, const std::optional<Tokenizer>& tokenizer) {
    const bool is_packed = train && train->is_packed && (!val || val->is_packed);
    if (!o.document_mask || is_packed) return;
    if (!tokenizer)
        fail(
            "--document-mask on: expected the tokenizer of the data, whose tokens tell documents apart, "
            "found "
            "none; --tokenizer FILE names it");
    const auto [begin, end] = tokenizer->marks;
    if (begin < 0 && end < 0)
        fail(tokenizer->path,
             ": --document-mask on: expected a token that begins or ends a text (bos, eos), "
             "found neither");
    if (const int32_t last = std::max(begin, end); last >= config.V)
        fail(tokenizer->path,
             ": --document-mask on: expected tokens that begin and end a text below the "
             "model's vocabulary of ",
             config.V, ", found ", last);
}

// A model that validates on other ids than it trains on would only look bad: refuse it.
void check_same_tokenizer(const Loader& train, const Loader& val) {
    const TokenShard& a = train.shards[0];
    for (const TokenShard& b : val.shards)
        if (a.tokenizer_hash && b.tokenizer_hash && a.tokenizer_hash != b.tokenizer_hash)
            fail(b.file.path, ": expected tokens of the tokenizer that made ", a.file.path,
                 ", found another's");
}

// The file that keeps the timing of matrix products; "": none does.
std::string gemm_cache(const Options& o) {
    if (o.gemm_cache) return *o.gemm_cache;
    const char *cache = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
    if (cache && *cache) return std::string(cache) + "/llamac/gemm.json";
    return home && *home ? std::string(home) + "/.cache/llamac/gemm.json" : "";
}

// Takes what the file keeps. Returns "", or the line that says why it is not taken. A file that the user names has to
// be one; our own is made anew.
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
// What cannot be kept is timed again next time: no reason to end a run.
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

// Refuses kernels that cannot be verified before it is known whether they take the model's shapes.
ModelOptions verifiable_model_options(const Config& config, const Options& o, const Ranks& ranks) {
    if (o.verify_every > 0) check_deterministic(KernelChoices(o.kernel));
    Options chosen = with_fp8_weights(config, o, ranks.count);
    // The rank with the least free memory decides for all.
    const bool stored = chosen.fp8_weights == Fp8Weights::stored;
    for (const double each : ranks.gather("fp8 weights", stored ? 1 : 0))
        if (each == 0) chosen.fp8_weights = Fp8Weights::recomputed;
    return model_options(chosen, ranks.own, ranks.count);
}

void set_initial_weights(Trainer& t) {
    const Options& o = t.options;
    if (!o.resume) t.warn("--resume auto: no checkpoint in " + o.out + ": the run begins at step 0");
    if (o.init == Init::load) return t.warn(load_weights(t.model.parameters, o.model));
    std::error_code none;  // what cannot be looked at is no directory
    if (std::filesystem::is_directory(o.model, none) && find_weights(o.model).empty())
        t.warn("--model " + o.model + ": the directory has no weights; the initial weights are random");
    initialize(t.model.parameters, t.config, static_cast<uint64_t>(o.seed));
}

// The data goes on where the checkpoint's run would have, or behind what is to be left out from here on.
void resume_data(Trainer& t, const Manifest& manifest) {
    const int64_t before = manifest.data_position - manifest.step * sequences_per_step(manifest);
    constexpr int64_t most = int64_t{1} << 53;
    if (before < 0 || before > most)
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

// How a run of version 0.1 had its products in fp8; nobody had run it where the types are others (fnuz).
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

void resume(Trainer& t, const Manifest& manifest) {
    check_resume(manifest, t.resumed_from, t.options, t.ranks.count);
    const DType dtype = t.model.options.precision.weights;
    Config saved = load_config(t.resumed_from);
    saved.pad = t.config.pad;  // checkpoints of earlier versions lack it
    if (config_json(saved, dtype) != config_json(t.config, dtype))
        fail(t.resumed_from, "/config.json: is not the model that --model ", t.options.model, " means");
    if (const std::string not_taken = t.model.gemms.use(manifest.gemms); !not_taken.empty())
        t.warn(t.resumed_from + ": the matrix products' choices are " + not_taken + ": other bits");
    if (const std::string changed = changed_flags(manifest, t.options, t.train ? t.train->sequences : 0);
        !changed.empty())
        t.warn(t.resumed_from + ": continues with other settings: " + changed);
    resume_data(t, manifest);
    load_weights(t.model.parameters, t.resumed_from);
    const std::vector<std::string> states = files_of(manifest, "optimizer", t.resumed_from);
    load_optimizer(t.model.parameters, states);
    if (manifest.step > 0) load_fp8(t.model, states[0], saved_fp8(manifest));
    t.step = manifest.step;
}

}  // namespace

Trainer::StagingBuffers::StagingBuffers(int64_t count, bool document_mask, int64_t hash_count, int64_t slots)
    : tokens(count),
      targets(count),
      first(document_mask ? count : 0),
      losses(count),
      squares(2),
      dloss(1),
      lr(1),
      step(1),
      hashes(hash_count),
      saturated(slots) {}

Trainer::Trainer(const Options& o, std::optional<int64_t> ahead, const Ranks& among)
    : options(o),
      config(model_config(o, warnings)),
      ranks(among),
      accumulation(micro_batches(o, ranks.count)),
      data_skip(o.data_skip),
      train(load_training_data(o, config, accumulation)),
      tokenizer(load_tokenizer(o, train)),
      questions(load_questions(o.eval_tasks, config.V, hash_of_ids(train, tokenizer))),
      schedule{o.schedule, o.lr, o.min_lr_frac, o.warmup_steps, o.steps},
      model(config, verifiable_model_options(config, o, ranks), ranks.communicator.get()),
      replays(model.options.graphs),
      most_in_flight(ahead.value_or(model.context.backend == Backend::device ? 1 : 0)) {
    if (!o.val_data.empty()) {
        val.emplace(load_data(o.val_data, o, config, 1));
        if (train) check_same_tokenizer(*train, *val);
        val->validation_batches(o.val_steps);  // refuses too little data now, not after the first hour
    }
    check_documents(o, config, train, val, tokenizer);
    if (o.sample_every > 0) sample_prompt();  // likewise, where the model has no such token
    token_slots.resize(static_cast<size_t>(most_in_flight) + 1);
    for (TokenSlot& f : token_slots) {
        std::vector<Tensor*> all = {&f.tokens, &f.targets};
        if (model.options.document_mask) all.push_back(&f.first);
        for (Tensor* t : all) model.arena.plan("tokens", t, shaped(DType::i32, {tokens_per_rank()}));
    }
    if (train)
        for (const std::string& line : run_warnings(o, config, *train, tokens_per_step() / o.seq_len))
            warn(line);
    warn(without_gemm_library());
    if (!o.graphs && !replays)
        warn(
            "--graphs auto: on AMD every kernel is launched directly, as nobody has run llamac's graphs "
            "there; "
            "--graphs on replays them (docs/rocm.md lists the known problems)");
    if (o.verify_every > 0) verifier.emplace(model, accumulation, adamw(), static_cast<uint64_t>(o.seed));
    if (o.dry_run) return;
    check_memory(model, o);  // before the host's is taken, too
    model.allocate();
    while (staging.size() < token_slots.size())
        staging.emplace_back(tokens_per_rank(), model.options.document_mask,
                             verifier ? verifier->hash_count() : 0, model.fp8 ? model.fp8->slots : 0);
    while (ends.size() <= staging.size()) ends.emplace_back();
    warn(take_gemm_choices(model.gemms, o));
    const ResumePoint point = find_checkpoint(o.out, o.resume, ranks);
    resumed_from = point.directory;
    for (const DamagedName& each : point.damaged) {
        damaged.push_back(each.name);
        warn("--resume auto: " + each.name + " is damaged: " + each.reason);
    }
    if (point.manifest)
        resume(*this, *point.manifest);
    else
        set_initial_weights(*this);
    finished = step;
    carried = read_carried_files(o.model, tokenizer ? tokenizer->path : "");

    for (const bool last : {false, true})
        for (const bool first : {false, true})
            micro_batches_by_place[last][first].work = [this, first, last] {
                forward_backward(model, first, last);
            };
    optimizer.work = [this] { optimizer_step(model, adamw(), static_cast<uint64_t>(options.seed)); };
}

void Trainer::warn(const std::string& line) {
    if (!line.empty()) warnings += (warnings.empty() ? "" : "\n") + line;
}

std::vector<std::pair<std::string, std::string>> Trainer::facts() const {
    const auto describe = [](const std::optional<Loader>& data) {
        if (!data) return std::string("none");
        return std::to_string(data->tokens) + " tokens in " + std::to_string(data->shards.size()) + " files";
    };
    return {{"--model", config_json(config, model.options.precision.weights)},
            {"--train-data", describe(train)},
            {"--val-data", describe(val)},
            {"--eval-tasks", checksums(questions)},
            {"--resume", resumed_from.empty() ? "no checkpoint" : resumed_from}};
}

AdamW Trainer::adamw() const {
    return {options.beta1, options.beta2, 1e-8, options.weight_decay, options.grad_clip};
}

bool Trainer::is_verified(int64_t number) const {
    return verifier && number % options.verify_every == 0;
}

void Trainer::launch(CapturedGraph& r) {
    const bool settled = is_settled(model);
    if (replays && r.settled && settled && !model.context.observer) {
        if (!r.graph) r.graph.emplace(model.stream.handle, r.work);
        return r.graph->replay();
    }
    r.work();
    r.launched = true;
    r.settled = settled;
}

const Event& Trainer::end_of(int64_t steps) const {
    return ends[static_cast<size_t>(steps) % ends.size()];
}

void Trainer::agree_with_ranks() {
    ranks.compare(options, facts());
    if (ranks.count == 1) return;
    model.gemms.gather = [this](const std::string& own) { return ranks.gather("GEMM choice", own); };
    warn(take_first_ranks_choices(model.gemms));
}

int64_t Trainer::counted_targets(const StagingBuffers& f) const {
    const int64_t rows = tokens_per_rank();
    const int64_t own = rows - std::count(f.targets.data, f.targets.data + rows, ignore_index);
    double all = 0;
    for (const double each : ranks.gather("targets", static_cast<double>(own))) all += each;
    return static_cast<int64_t>(all);
}

void Trainer::start_step() {
    const int64_t rows = options.batch_size * options.seq_len;
    const Fill fill = [this, rows](int64_t micro, StagingBuffers& f) {
        int32_t* first = model.options.document_mask ? f.first.data + micro * rows : nullptr;
        train->micro_batch(step, micro, ranks.own, ranks.count, f.tokens.data + micro * rows,
                           f.targets.data + micro * rows, data_skip, first);
        if (!train->is_packed)
            find_documents(f, micro * options.batch_size, options.batch_size, options.seq_len);
    };
    StagingBuffers& f = fill_buffers(fill);
    // Where no target of the step counts, its loss and gradients are 0 whatever the scale.
    run_step(f, train->is_packed ? scale_of(std::max<int64_t>(counted_targets(f), 1)) : 1);
}

void Trainer::wait_for_device() {
    if (micro_batches_queued >= 2) micro_ends[micro_batches_queued % 2].wait();
    if (between) between();
}

void Trainer::find_documents(StagingBuffers& f, int64_t first_row, int64_t rows, int64_t T) const {
    if (!model.options.document_mask) return;
    const int64_t first_id = first_row * T;
    llamac::find_documents(f.tokens.data + first_id, rows, T, tokenizer->marks, f.first.data + first_id);
}

void Trainer::copy_tokens(int64_t micro, StagingBuffers& f, const TokenSlot& slot) {
    const int64_t rows = options.batch_size * options.seq_len, first_id = micro * rows;
    Context copying = model.context;
    copying.stream = copies.handle;
    const auto copy_ahead = [&](const PinnedMemory<int32_t>& from, const Tensor& to) {
        copy_bytes_async(copying, static_cast<int32_t*>(to.data) + first_id, from.data + first_id,
                         rows * size_of(to.dtype));
    };
    copy_ahead(f.tokens, slot.tokens);
    copy_ahead(f.targets, slot.targets);
    if (slot.first.data) copy_ahead(f.first, slot.first);
    f.copied.record(copies.handle);
    f.copied.wait_event(model.stream.handle);
}

void Trainer::queue_micro_batch(int64_t micro, StagingBuffers& f, const TokenSlot& slot) {
    const int64_t first_id = micro * options.batch_size * options.seq_len;
    const auto ids = [&](const Tensor& all) { return static_cast<const int32_t*>(all.data) + first_id; };
    set_batch(model, ids(slot.tokens), ids(slot.targets), options.batch_size, options.seq_len,
              slot.first.data ? ids(slot.first) : nullptr);
    // What follows the last micro-batch is the same with one rank.
    const bool last = ranks.count == 1 || micro == accumulation - 1;
    launch(micro_batches_by_place[last][micro == 0]);
    const Tensor& losses = model.activations.losses;
    copy_bytes_async(model.context, f.losses.data + first_id, losses.data, losses.bytes());
    micro_ends[micro_batches_queued++ % 2].record(model.stream.handle);
}

double Trainer::scale_of(int64_t counted) const {
    CHECK(counted > 0);
    return static_cast<double>(tokens_per_step()) / static_cast<double>(counted);
}

Trainer::Fill Trainer::filled_by(const Batch& batch) const {
    return [this, &batch](int64_t micro, StagingBuffers& f) {
        const int64_t B = options.batch_size, T = options.seq_len;
        batch(micro, f.tokens.data + micro * B * T, f.targets.data + micro * B * T);
        find_documents(f, micro * B, B, T);
    };
}

void Trainer::start_step(const Batch& batch) {
    run_step(fill_buffers(filled_by(batch)), 1);
}

void Trainer::start_step(const Batch& batch, int64_t counted) {
    run_step(fill_buffers(filled_by(batch)), scale_of(counted));
}

Trainer::StagingBuffers& Trainer::fill_buffers(const Fill& fill) {
    CHECK(in_flight() <= most_in_flight);
    StagingBuffers& f = staging[static_cast<size_t>(step) % staging.size()];
    ranks.together("training data", [&] {
        for (int64_t micro = 0; micro < accumulation; micro++) fill(micro, f);
    });
    return f;
}

void Trainer::run_step(StagingBuffers& f, double loss_scale) {
    // The first step meets all products that are worth a timing; samples have others at every length.
    const bool first = !optimizer.launched;
    const GemmTuning tuning(model.gemms, first && options.tune);
    const Range step_range("step", step + 1);
    const TokenSlot& ids = token_slots[static_cast<size_t>(step) % token_slots.size()];
    if (in_flight() == 0) end_of(step).record(model.stream.handle);
    const bool verified = is_verified(step + 1);
    if (verified) verifier->begin();
    clear_saturated(model);
    follow_loss_scale(model, loss_scale);
    f.loss_scale = loss_scale;
    const double of_mean = 1.0 / static_cast<double>(accumulation * ranks.count) * loss_scale;
    f.dloss.data[0] = static_cast<float>(of_mean / static_cast<double>(options.batch_size * options.seq_len));
    set_dloss(model, f.dloss.data);
    try {
        for (int64_t micro = 0; micro < accumulation; micro++) {
            const Range range("micro-batch", micro);
            wait_for_device();
            copy_tokens(micro, f, ids);
            queue_micro_batch(micro, f, ids);
            if (verified) verifier->end_micro_batch(0, micro);
        }
        if (verified) {
            verifier->end_first_pass();
            clear_saturated(model);
        }
        for (int64_t micro = 0; verified && micro < accumulation; micro++) {
            wait_for_device();
            queue_micro_batch(micro, f, ids);
            verifier->end_micro_batch(1, micro);
        }
    } catch (...) {
        // The step may be started again: in the same buffers, which micro-batches of this start may still read.
        if (micro_batches_queued > 0) micro_ends[(micro_batches_queued - 1) % 2].wait();
        throw;
    }
    const Range range("optimizer");
    f.lr.data[0] = static_cast<float>(learning_rate(schedule, step + 1));
    f.step.data[0] = static_cast<int32_t>(step + 1);
    set_step(model, f.lr.data, f.step.data);
    if (verified) verifier->repeat_optimizer_step();
    launch(optimizer);
    copy_bytes_async(model.context, f.squares.data, model.squares.data, sizeof(double));
    if (model.loss_squares.data)
        copy_bytes_async(model.context, f.squares.data + 1, model.loss_squares.data, sizeof(double));
    copy_saturated(model, f.saturated.data);
    if (verified) verifier->end(f.hashes.data);
    end_of(step + 1).record(model.stream.handle);
    step++;
    if (first && ranks.is_first()) keep_gemm_choices(model.gemms, options);
}

StepResult Trainer::finish_step() {
    CHECK(in_flight() > 0);
    const StagingBuffers& f = staging[static_cast<size_t>(finished) % staging.size()];
    const Event &begin = end_of(finished), &end = end_of(finished + 1);
    end.wait();
    const double ms = end.ms_since(begin);
    finished++;
    if (is_verified(finished))
        ranks.together("verification", [&] {
            const std::string wrong = verifier->difference(f.hashes.data);
            if (wrong.empty()) return;
            CHECK(hipDeviceSynchronize());  // the memory of later steps goes with the trainer
            fail("step ", finished, ": ", wrong);
        });
    const bool skipped = model.loss_squares.data && is_skipped(f.squares.data[0], f.squares.data + 1);
    return {finished,
            mean_over_ranks(mean(f.losses.data, tokens_per_rank())) * f.loss_scale,
            grad_norm(f.squares.data[0]),
            learning_rate(schedule, finished),
            ms,
            skipped,
            saturated_tensors(f.saturated.data)};
}

std::vector<Saturated> Trainer::saturated_tensors(const int32_t* counts) const {
    if (!model.fp8) return {};
    std::string own;
    for (int64_t slot = 0; slot < model.fp8->slots; slot++)
        if (counts[slot] != 0)
            own += std::to_string(slot) + " " + std::to_string(static_cast<uint32_t>(counts[slot])) + " ";
    std::map<int64_t, int64_t> everybodys;
    for (const std::string& text : ranks.gather("saturated", own)) {
        std::istringstream numbers(text);
        for (int64_t slot = 0, count = 0; numbers >> slot >> count;) everybodys[slot] += count;
    }
    const int64_t rows = options.batch_size * options.seq_len, passes = accumulation * ranks.count;
    std::vector<Saturated> tensors;
    for (const auto& [slot, count] : everybodys)
        tensors.push_back(
            {slot_name(config, slot), count, passes * slot_elements(model.parameters, slot, rows)});
    return tensors;
}

double Trainer::mean_over_ranks(double number) const {
    const std::vector<double> numbers = ranks.gather("loss", number);
    return std::accumulate(numbers.begin(), numbers.end(), 0.0) / static_cast<double>(ranks.count);
}

}  // namespace llamac
