// train_llama3: the loop of a training run. Flags: options.h; one step: trainer.h; output: log.h.
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <exception>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/output.h"
#include "core/clock.h"
#include "core/file.h"
#include "core/words.h"
#include "platform/cpu_level.h"
#include "platform/ranks/launch.h"
#include "platform/threads.h"
#include "program/list_kernels.h"
#include "program/log.h"
#include "program/plot.h"
#include "program/spikes.h"
#include "program/stop.h"
#include "program/watchdog.h"
#include "run/version.h"
#include "train/estimate.h"
#include "train/evaluate.h"
#include "train/memory.h"
#include "train/peak.h"
#include "train/profile.h"
#include "train/save.h"

namespace llamac {
namespace {

// Every token file stays open. The usual limit is 1024, the hard one far above: it is low for programs that call select().
void allow_many_files() {
    rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) return;
    files.rlim_cur = files.rlim_max;
    static_cast<void>(setrlimit(RLIMIT_NOFILE, &files));
}

std::string computing_device(const Options& options) {
    if (options.dry_run && (!options.device.empty() || options.device_memory.bytes > 0)) {
        const std::string device = options.device.empty() ? "a device" : options.device;
        return std::to_string(options.devices) + " x " + device +
               formatted(" of %.4g GiB", std::ldexp(options.device_memory.bytes, -30));
    }
    if (computing_context().backend == Backend::host) {
        const std::string level = cpu_level();
        return "CPU, " + std::to_string(host_threads()) + " threads" + (level.empty() ? "" : ", " + level);
    }
    return device_properties().name;
}

Origin origin_of(const Trainer& t) {
    if (!t.resumed_from.empty()) return {"resumed", t.resumed_from};
    if (t.options.init == Init::load) return {"loaded", t.options.model};
    return {};
}

const Clock::time_point launched = Clock::now();
double ms_since(Clock::time_point begin) {
    return 1e3 * seconds_since(begin);
}

bool is_due(int64_t every, int64_t step) {
    return every > 0 && step % every == 0;
}

// The layers of each stage, or of each of their chunks, and the part of the time in which a stage waits.
std::string pipeline_text(const Trainer& t) {
    if (t.mesh.pipeline.ranks == 1) return "";
    std::string text = ", pipeline " + std::to_string(t.mesh.pipeline.ranks) + " of";
    for (const LayerRange& each : parts_of(t.config, t.model.options))
        text += (each.first ? ", " : " ") + std::to_string(each.end - each.first);
    return text + formatted(" layers, bubble %.1f%%",
                            100 * bubble(t.mesh.pipeline.ranks, t.accumulation, t.options.pp_chunks));
}

void describe(Log& log, const Trainer& t, bool copies_state) {
    for (const auto& [heading, rows] : configuration_rows(t.options)) log.table(heading, rows);
    const Config& c = t.config;
    const std::string mesh = "tensor " + std::to_string(t.mesh.tensor.ranks) + ", context " +
                             std::to_string(t.mesh.context.ranks) + ", data " +
                             std::to_string(t.mesh.data.ranks) + pipeline_text(t);
    log.table("this run",
              {{"computes on", computing_device(t.options)},
               {"mesh of devices", mesh},
               {"parameters", grouped(count_parameters(c))},
               {"parameters that train", grouped(t.model.parameters.trained())},
               {"layers, channels, heads", std::to_string(c.L) + ", " + std::to_string(c.C) + ", " +
                                               std::to_string(c.NH) + "/" + std::to_string(c.NKV)},
               {"tokens per step", grouped(t.tokens_per_step())},
               {"training tokens", grouped(t.data.train ? t.data.train->tokens : 0)},
               {"validation tokens", grouped(t.data.val ? t.data.val->tokens : 0)}});
    std::vector<MemoryRow> rows = memory_rows(t.model, !t.options.dry_run);
    if (copies_state) rows.push_back(copy_row(t));
    log.memory(rows);
}

void print_estimate(Log& log, Trainer& t, const PlannedDevice& device) {
    const Estimate e = estimate_step(t, device);
    const double alone = one_device_seconds(t.options, t.tokens_per_step(), device);
    const auto ranks = static_cast<double>(t.ranks.count), tokens = static_cast<double>(t.tokens_per_step());
    const double useful = tokens * t.flops_per_token() / ranks / e.seconds;
    const auto peak = device.flops.find(name(t.model.options.precision.weights));
    log.table(
        "estimate",
        {{"GiB per device", formatted("%.1f", std::ldexp(static_cast<double>(e.memory), -30))},
         {"micro-batches per step", std::to_string(t.accumulation)},
         {"seconds per step", formatted("%.3g", e.seconds)},
         {"waits for exchanges", formatted("%.3g s", e.waited)},
         {"waits for other stages", formatted("%.3g s", e.idle)},
         {"tokens/s", grouped(std::llround(tokens / e.seconds))},
         {"% of one device's, per device", formatted("%.1f", 100 * alone / ranks / e.seconds)},
         {"% of peak", peak == device.flops.end() ? "-" : formatted("%.1f", 100 * useful / peak->second)},
         {"days", formatted("%.3g", static_cast<double>(t.options.steps) * e.seconds / 86400)}});
    log.print(assumptions(device));
}

// Prints the plan of a run; writes nothing.
int finish_dry_run(Trainer& t) {
    Log log("", {});
    describe(log, t, saves_async(t));
    if (!t.warnings.empty()) log.print(t.warnings);
    if (t.mesh.pipeline.ranks > 1)
        log.print("the memory is that of stage " + std::to_string(t.mesh.pipeline.rank + 1) +
                  ", which takes the most");
    check_memory(t.model, t.options);
    if (!t.options.device.empty()) print_estimate(log, t, find_device(t.options.device));
    log.print(
        "dry run: the run fits with these flags (`llamac plan` searches for others); nothing was allocated, "
        "computed or written");
    return 0;
}

// The loop of a run. After a signal or an error it saves a checkpoint of the finished steps.
struct Loop {
    Trainer& t;
    const OutputFolder& out;
    Log& log;
    std::unique_ptr<AsyncSaves> saves;  // null: training pauses while a checkpoint is written
    Watchdog watchdog;
    Profile profile;
    UsageMeter usage = {};
    SpikeDetector spikes = {};
    int64_t skipped = 0;                     // steps in a row
    std::optional<double> bytes_per_target;  // of the validation data
    std::string saved;                       // the newest checkpoint; "": there is none
    int64_t saved_step;                      // of it, or the first one
    bool start_is_logged = false;
    bool sound = true;                           // the weights; and the disk, as far as is known
    int ended_by = 0;                            // a signal to any rank
    std::optional<Clock::time_point> agreed_at;  // the time since is one micro-batch's work
    Clock::duration longest_work{};
    // An asynchronous save in progress; pause_ms: the pause of training.
    struct Writing {
        int64_t step;
        double pause_ms;
    };
    std::optional<Writing> writing;

    Loop(Trainer& trainer, const OutputFolder& folder, Log& to, std::unique_ptr<AsyncSaves> async,
         double peak)
        : t(trainer),
          out(folder),
          log(to),
          saves(std::move(async)),
          watchdog(t.options.watchdog),
          profile(choose_profiled_steps(t.step + 1, t.options.steps, t.options.profile), t.model.context,
                  out.folder(), peak, t.ranks.is_first()),
          saved(t.resumed_from),
          saved_step(t.step) {
        t.written = [this] { watchdog.progress(); };
        t.between = [this] {
            watchdog.progress();
            // Ranks end together, so that none waits for one that has ended.
            if (ended_by == 0) agree();
            // NOLINTNEXTLINE(bugprone-std-exception-baseclass): stop.h
            if (ended_by != 0) throw Stopped();
        };
    }
    Loop(const Loop&) = delete;
    ~Loop() {
        saves.reset();  // its thread calls t.written
        t.written = t.between = nullptr;
    }

    void run() {
        try {
            try {
                run_steps();
            } catch (const Stopped&) {
            }
            finish(0);
            finish_save();
            t.ranks.together("profile", [&] {
                profile.finish();
                log.saturated();
            });
            log.print_usage();
            if (t.options.checkpoint_every >= 0 && t.step > saved_step) save(false);
        } catch (const ReportedElsewhere&) {
            save_on_error(true);
            throw;
        } catch (const AgreedError& error) {
            fail(error.what(), save_on_error(true));
        } catch (const std::exception& error) {
            const bool alone = t.ranks.count == 1;
            if (!alone) t.ranks.abandon();
            fail(reason_of(error), save_on_error(alone));
        }
    }

  private:
    // The time limit of the ranks' agreement after a signal, by the time of their work so far.
    unsigned agreement_seconds() const {
        return 5 + 2 * static_cast<unsigned>(std::chrono::ceil<std::chrono::seconds>(longest_work).count());
    }

    // One signal ends all ranks.
    void agree() {
        const int own = stop_signal();
        if (t.ranks.count == 1) {
            ended_by = own;
            return;
        }
        if (agreed_at) longest_work = std::max(longest_work, Clock::now() - *agreed_at);
        limit_agreement(agreement_seconds());
        for (const double signal : t.ranks.gather("signal", static_cast<double>(own)))
            ended_by = std::max(ended_by, static_cast<int>(signal));
        agreed_at = Clock::now();
        if (ended_by != 0) limit_agreement(0);
    }

    void validate() {
        watchdog.begins("validation at step", t.step);
        if (!t.data.val) return;
        const double loss = llamac::validate(t);
        t.ranks.together("log", [&] {
            if (!bytes_per_target) bytes_per_target = validation_bytes_per_target(t);
            log.val(t.step, loss, *bytes_per_target);
        });
    }

    void evaluate() {
        if (t.data.questions.empty()) return;
        watchdog.begins("evaluation at step", t.step);
        const std::vector<Score> scores = llamac::evaluate(t);
        t.ranks.together("log", [&] {
            for (const Score& score : scores) log.evaluation(t.step, score);
        });
    }

    void sample() {
        watchdog.begins("sample at step", t.step);
        std::string text;
        const auto make = [&] { text = sample_text(t); };
        // Shared weights are gathered meanwhile: a rank that fails cannot keep the others from waiting for it.
        t.model.options.passes_exchange() ? make() : t.ranks.together("sample", make);
        t.ranks.together("log", [&] { log.sample(t.step, text); });
    }

    // goes_on: whether training continues, so that the checkpoint can be written meanwhile.
    void save(bool goes_on) {
        const Clock::time_point begin = Clock::now();
        finish_save();
        watchdog.begins("checkpoint of step", t.step);
        const OpenFolder* folder = nullptr;
        t.ranks.together("log", [&] {
            log.saturated();
            folder = &out.folder();
        });
        limit_agreement(0);  // a save takes its time
        if (goes_on && saves) {
            start_save(t, *saves, *folder);
            saved_step = t.step;
            writing = {t.step, ms_since(begin)};
        } else {
            sound = false;  // until it is written
            saved_step = t.step;
            saved = llamac::save(t, *folder);
            sound = true;
            t.ranks.together("log", [&] { log.checkpoint(t.step, saved, ms_since(begin)); });
        }
        if (agreed_at) limit_agreement(agreement_seconds());
        agreed_at.reset();
    }

    // Waits for the checkpoint that is being written, if there is one.
    void finish_save() {
        if (!writing) return;
        const Writing done = *std::exchange(writing, std::nullopt);
        watchdog.begins("checkpoint of step", done.step);
        limit_agreement(0);
        const bool weights_are = std::exchange(sound, false);  // until it is written
        saved = saves->finish();
        sound = weights_are;
        t.ranks.together("log", [&] { log.checkpoint(done.step, saved, done.pause_ms); });
    }

    // The first steps tune matrix products and capture graphs; then the times of the start are known.
    void log_start(const StepResult& r) {
        if (t.start.total == 0) t.start.first_step = r.ms / 1e3, t.start.total = seconds_since(launched);
        if (start_is_logged || !(t.has_started() || r.step == t.options.steps)) return;
        start_is_logged = true;
        log.startup(t.start);
    }
    // About 100 times per run, so that the log of many ranks stays small.
    void log_ranks(int64_t step) {
        if (t.ranks.count == 1 || !is_due(std::max<int64_t>(1, t.options.steps / 100), step)) return;
        const std::vector<std::string> usages = t.ranks.gather("usage", usage_text(usage.read()));
        t.ranks.together("log", [&] { log.ranks(step, usages); });
    }

    void finish(int64_t in_flight) {
        while (t.in_flight() > in_flight) {
            sound = false;  // until the step is known to be right
            const StepResult r = t.finish_step();
            watchdog.start();  // not for the first step, which times kernels
            watchdog.progress();
            const bool finite = std::isfinite(r.loss) && std::isfinite(r.grad_norm);
            // Else every weight is as bad from here on, and the next checkpoints would replace the good ones.
            skipped = r.skipped ? skipped + 1 : 0;
            const bool rescaled = r.loss_scale > 0 && t.options.skip_nonfinite == 0;
            sound = r.skipped ? rescaled || skipped <= t.options.skip_nonfinite : finite;
            t.ranks.together("log", [&] {
                log.step(r, usage.read());
                log_start(r);
            });
            log_ranks(r.step);
            if (finite)
                for (const Spike& spike : spikes.add(r.loss, r.grad_norm))
                    t.ranks.together("log", [&] { log.spike(r.step, spike); });
            if (!sound)
                t.ranks.together("step", [&] {
                    fail("step ", r.step, ": expected a finite loss and gradient norm, found ", r.loss,
                         " and ", r.grad_norm,
                         skipped > 0 ? ", after " + std::to_string(skipped - 1) + " steps skipped" : "");
                });
        }
    }

    // Work after a step, besides a checkpoint.
    struct Due {
        bool validation, evaluation, sample;
    };
    Due due() const {
        const Options& o = t.options;
        const auto now = [&](int64_t every) { return t.step == o.steps || is_due(every, t.step); };
        return {now(o.val_every), !t.data.questions.empty() && now(o.eval_every),
                o.sample_every > 0 && t.config.causal && now(o.sample_every)};
    }
    void follow(const Due& due) {
        if (due.validation) validate();
        if (due.evaluation) evaluate();
        if (due.sample) sample();
    }

    // A signal during validation, evaluation or a sample leaves a checkpoint of the step, and a log without the event.
    void finish_interrupted_step() {
        const std::set<std::string>& logged = out.logged();
        if (!logged.count("step")) return;  // the log begins here
        const Due all = due();
        follow({all.validation && !logged.count("val"), all.evaluation && !logged.count("evaluation"),
                all.sample && !logged.count("sample")});
    }

    void run_steps() {
        const Options& o = t.options;
        if (t.step == 0)
            follow({true, true, false});
        else
            finish_interrupted_step();
        while (t.step < o.steps) {
            watchdog.begins("step", t.step + 1);
            profile.begin_step(t.step + 1);
            t.start_step();
            profile.end_step();
            const bool checkpoint =
                o.checkpoint_every >= 0 && (t.step == o.steps || is_due(o.checkpoint_every, t.step));
            const bool profiled = profile.ends_with(t.step);
            const Due next = due();
            const bool waits = next.validation || next.evaluation || next.sample || checkpoint || profiled;
            finish(waits ? 0 : t.max_in_flight);
            if (writing && saves->is_done()) finish_save();
            if (profiled) t.ranks.together("profile", [&] { profile.finish(); });
            follow(next);
            if (checkpoint) save(t.step < o.steps);
        }
    }

    // After an error: logs the finished steps and, if all ranks have agreed on the error, saves them. Returns an addition to the
    // error's line.
    std::string save_on_error(bool agreed) {
        const auto attempt = [](const auto& call) {
            try {
                call();
            } catch (const std::exception&) {  // the error that led here is the one that is reported
            }
        };
        attempt([&] { finish_save(); });
        attempt([&] { log.flush(); });
        if (agreed)
            attempt([&] {
                while (t.in_flight() > 0) {
                    const StepResult r = t.finish_step();
                    sound &= r.skipped || (std::isfinite(r.loss) && std::isfinite(r.grad_norm));
                    if (sound) attempt([&] { log.step(r, usage.read()); });
                }
                if (sound && t.options.checkpoint_every >= 0 && t.step > saved_step) {
                    const Clock::time_point begin = Clock::now();
                    saved_step = t.step;
                    saved = llamac::save(t, out.folder());
                    attempt([&] { log.checkpoint(t.step, saved, ms_since(begin)); });
                }
            });
        // A rank may be lost after a checkpoint has got its name, while older ones are removed.
        attempt([&] {
            const std::string last = out.folder().path + "/" + step_name(saved_step);
            if (exists(last)) saved = last;
        });
        return saved.empty() ? "; there is no checkpoint" : "; the last checkpoint is " + saved;
    }
};

// The loop's checkpoint of the last step, if there is one, and the signal that ended it, if one did.
std::pair<std::string, int> train(Trainer& t, const OutputFolder& out, Log& log,
                                  std::unique_ptr<AsyncSaves> saves, double peak) {
    std::optional<Loop> loop;
    t.ranks.together("start", [&] { loop.emplace(t, out, log, std::move(saves), peak); });
    loop->run();
    return {t.step == loop->saved_step ? loop->saved : "", loop->ended_by};
}

// Only the first rank prints.
std::FILE* console_of(const Ranks& ranks) {
    return ranks.is_first() ? stdout : std::fopen("/dev/null", "w");
}

// What one may call after a run with a checkpoint in `out`.
std::string next_commands(const std::string& out, const Trainer& t) {
    const std::string word = shell_word(out),
                      talk = has_chat_template(t.tokenizer_files) ? "llamac chat " : "llamac generate ";
    const std::string report = "llamac report " + word;
    if (t.model.lora)
        return "llamac export merge " + word + " " + shell_word(out + "-merged") + "\n" + report;
    return (t.data.tokenizer ? talk + word + "\n" : "") + report;
}

// program: its name on the command line. connecting: seconds until the ranks were connected.
int run_training(const std::string& program, const Options& options, const Ranks& ranks, double connecting) {
    std::optional<OutputFolder> folder;
    ranks.together("output folder", [&] { folder.emplace(options.out, ranks.is_first()); });
    std::optional<Trainer> trainer;
    ranks.together("loading", [&] { trainer.emplace(options, std::nullopt, ranks); });
    OutputFolder& out = *folder;
    Trainer& t = *trainer;
    t.start.ranks = connecting;
    std::unique_ptr<AsyncSaves> saves = prepare_async_saves(t);
    answer_stop_signals();
    std::vector<std::string> moved;
    ranks.together("output folder", [&] {
        if (!ranks.is_first()) return;
        moved = out.prepare(t.resumed_from, t.step, t.damaged);
        write_file(out.folder(), run_config_name, run_config(options));
    });
    const std::string logged = ranks.gather("logged", out.logged_text())[0];
    ranks.together("output folder", [&] {
        if (!ranks.is_first()) out.join(logged);
    });
    const RunShape shape{
        options.steps,
        static_cast<double>(t.tokens_per_step()),
        t.flops_per_token(),
        peak_flops(t.model.options.precision.weights) * static_cast<double>(ranks.count),
        t.model.context.backend == Backend::device,
        options.log_every.value_or(std::max<int64_t>(1, options.steps / 100 + (options.steps % 100 > 0))),
        t.data.train ? t.data.train->sequences * options.seq_len : 0};
    std::optional<Log> opened;
    ranks.together("log",
                   [&] { opened.emplace(ranks.is_first() ? options.out : "", shape, console_of(ranks)); });
    Log& log = *opened;
    log.before_write = [&out] { out.check(); };
    for (const std::string& line : moved) log.print(line);
    describe(log, t, saves != nullptr);
    if (!t.warnings.empty()) log.print(t.warnings);
    if (!t.resumed_from.empty()) log.print("resuming from " + t.resumed_from);
    ranks.together("log", [&] {
        log.describe_run(computing_device(options), count_parameters(t.config), ranks.count, origin_of(t));
        log.start(to_json(options));
    });
    const bool under_launcher = ranks.count > 1 && options.devices == 1;
    const auto [saved, signal] = train(t, out, log, std::move(saves), shape.peak_flops);
    ranks.barrier();  // none ends while another one needs it
    if (ranks.is_first()) {
        out.check();
        const std::string plot = draw_loss_plot(options.out);
        log.print((signal ? std::string("interrupted by ") + signal_name(signal) : "done") + ": " +
                  (saved.empty() ? "no model" : "model " + saved) + ", log " + options.out + "/log.jsonl, " +
                  plot);
        if (!signal && parent_of(saved) == options.out) log.print_as_is(next_commands(options.out, t));
        if (signal) {
            log.print(std::string("to continue the run") +
                      (under_launcher ? ", with the same launcher:" : ":"));
            log.print_as_is("  " + resume_command(program, options));
        }
    }
    return signal ? exit_code_of(signal) : 0;
}

// The plan of one of so many ranks.
int plan_training(const Options& options, int64_t count) {
    const Options planned = planned_options(options);
    const Ranks ranks = planned_ranks(planned, count);
    Trainer plan(planned, {}, ranks);
    return finish_dry_run(plan);
}

// Work of the first rank alone. Nothing if the options ask for a run.
std::optional<int> run_once(const Options& options, int64_t ranks) {
    if (!options.list_kernels.empty()) return list_kernels(options.list_kernels), 0;
    if (options.print_config) return std::fputs(to_toml(options).c_str(), stdout), 0;
    computing_context();  // a machine without the device is told so before any work
    if (options.dry_run) return plan_training(options, ranks);
    if (options.train_data.empty()) fail("--train-data: expected a pattern of files, found none");
    return {};
}

// The main thread waits for a rank that is lost, in a call of the device.
void end_abandoned(const LostRank& lost) {
    std::fprintf(stderr, "train_llama3: %s\n", lost.what());
    _exit(2);
}

int run_program(int argc, char** argv) {
    const Launch launch = join_launch();
    // Before the ranks meet, because flags set their time limits; one rank reports a wrong flag.
    Options options;
    std::string wrong;
    try {
        options = parse_options(argc, argv);
    } catch (const std::exception& error) {
        wrong = reason_of(error);
    }
    const Clock::time_point begin = Clock::now();
    Ranks ranks(launch, Patience(options));
    double connecting = seconds_since(begin);
    std::optional<int> done;
    ranks.together("options", [&] {
        if (!wrong.empty()) fail(wrong);
        check_launch(ranks, options);
    });
    const std::optional<bool>& async = options.checkpoint_async;
    ranks.compare(options, {{"the program's version", version_text()},
                            {"--checkpoint-async", !async   ? "auto"
                                                   : *async ? "on"
                                                            : "off"}});
    ranks.together("plan", [&] {
        if (ranks.is_first()) done = run_once(options, std::max(ranks.count, options.devices));
    });
    if (ranks.gather("done", done ? 1 : 0)[0] != 0) return done.value_or(0);
    if (ranks.count == 1 && options.devices > 1) {
        check_engine(Launcher::torchrun, options.devices);  // once, before there are ranks
        check_collectives(options.devices);
        return run_ranks(options.devices, argv, options.collective_timeout + 5);
    }
    const Clock::time_point meeting = Clock::now();
    ranks.connect_devices(end_abandoned);
    connecting += seconds_since(meeting);
    try {
        return run_training(argv[0], options, ranks, connecting);
    } catch (const AgreedError&) {
        throw;
    } catch (...) {
        ranks.abandon();  // unwinding waits for other ranks
        throw;
    }
}

}  // namespace
}  // namespace llamac

int main(int argc, char** argv) {
    llamac::limit_spinning(argv);
    llamac::ignore_write_signals();
    llamac::allow_many_files();
    try {
        return llamac::run_program(argc, argv);
    } catch (const llamac::ReportedElsewhere&) {
    } catch (const llamac::Error& error) {
        std::fprintf(stderr, "train_llama3: %s\n", error.what());
    } catch (const std::exception& error) {
        std::fprintf(stderr, "train_llama3: %s\n", llamac::reason_of(error).c_str());
    }
    return 2;
}
