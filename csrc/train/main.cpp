// train_llama3: the loop of a training run. Flags: options.h; one step: trainer.h; what it prints: log.h.
#include <sys/resource.h>

#include <cmath>
#include <new>

#include "core/registry.h"
#include "platform/threads.h"
#include "train/log.h"
#include "train/memory.h"
#include "train/peak.h"
#include "train/plot.h"
#include "train/profile.h"
#include "train/resume.h"
#include "train/stop.h"
#include "train/trainer.h"
#include "train/watchdog.h"

namespace llamac {
namespace {

// Every token file stays open. The usual limit is 1024, the hard one far above: it is low for programs that call select().
void allow_many_files() {
    rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) return;
    files.rlim_cur = files.rlim_max;
    static_cast<void>(setrlimit(RLIMIT_NOFILE, &files));
}

std::string computing_device() {
    if (computing_context().backend == Backend::host)
        return "CPU, " + std::to_string(host_threads()) + " threads";
    return device_properties().name;
}

bool is_due(int64_t every, int64_t step) {
    return every > 0 && step % every == 0;
}

void describe(Log& log, const Trainer& t) {
    for (const auto& [heading, rows] : configuration_rows(t.options)) log.table(heading, rows);
    const Config& c = t.config;
    log.table("this run",
              {{"computes on", computing_device()},
               {"parameters", grouped(count_parameters(c))},
               {"layers, channels, heads", std::to_string(c.L) + ", " + std::to_string(c.C) + ", " +
                                               std::to_string(c.NH) + "/" + std::to_string(c.NKV)},
               {"tokens per step", grouped(t.tokens_per_step())},
               {"training tokens", grouped(t.train->tokens)},
               {"validation tokens", grouped(t.val ? t.val->tokens : 0)}});
    log.memory(memory_rows(t.model, !t.options.dry_run));
}

// The plan of a run that is not begun: nothing is written.
int finish_dry_run(const Trainer& t) {
    Log log("", {});
    describe(log, t);
    if (!t.warnings.empty()) log.print(t.warnings);
    check_memory(t.model, t.options);
    log.print("dry run: the run fits; nothing was allocated, computed or written");
    return 0;
}

// The loop of a run, to its end, a signal or an error; after either, with a checkpoint of what was finished.
struct Loop {
    Trainer& t;
    Log& log;
    Watchdog watchdog;
    Profile profile;
    UsageMeter usage = {};
    std::string saved;     // the newest checkpoint; "": there is none
    int64_t saved_step;    // of it, or the first one
    bool sound = true;     // the weights; and the disk, as far as is known
    bool stopped = false;  // by a signal

    Loop(Trainer& trainer, Log& to, double peak)
        : t(trainer),
          log(to),
          watchdog(t.options.watchdog),
          profile(choose_profiled_steps(t.step + 1, t.options.steps, t.options.profile), t.model.context,
                  t.options.out, peak),
          saved(t.resumed_from),
          saved_step(t.step) {
        t.written = [this] { watchdog.progress(); };
        t.between = [this] {
            watchdog.progress();
            if (stop_signal() != 0) throw Stopped();
        };
    }
    Loop(const Loop&) = delete;
    ~Loop() { t.written = t.between = nullptr; }

    void run();

  private:
    void run_steps();
    void finish(int64_t in_flight);
    void validate();
    void save();
    std::string rescue();
};

void Loop::validate() {
    watchdog.begins("validation at step", t.step);
    if (t.val) log.val(t.step, t.validate());
}

void Loop::save() {
    watchdog.begins("checkpoint of step", t.step);
    sound = false;  // until it is written
    saved = t.save();
    sound = true;
    saved_step = t.step;
    log.checkpoint(t.step, saved);
}

void Loop::finish(int64_t in_flight) {
    while (t.in_flight() > in_flight) {
        const StepResult r = t.finish_step();
        watchdog.start();  // not for the first step, which times kernels
        watchdog.progress();
        // Every weight is as bad from here on, and the next checkpoints would replace the good ones.
        sound &= std::isfinite(r.loss) && std::isfinite(r.grad_norm);
        log.step(r, usage.read());
        if (!sound)
            fail("step ", r.step, ": expected a finite loss and gradient norm, found ", r.loss, " and ",
                 r.grad_norm);
    }
}

void Loop::run_steps() {
    const Options& o = t.options;
    if (t.step == 0) validate();
    while (t.step < o.steps) {
        watchdog.begins("step", t.step + 1);
        profile.begin_step(t.step + 1);
        t.start_step();
        profile.end_step();
        const bool last = t.step == o.steps;
        const bool val = last || is_due(o.val_every, t.step),
                   checkpoint = o.checkpoint_every >= 0 && (last || is_due(o.checkpoint_every, t.step));
        const bool sample = o.sample_every > 0 && (last || is_due(o.sample_every, t.step));
        finish(val || checkpoint || sample || profile.is_complete() ? 0 : t.most_in_flight);
        if (profile.is_complete()) profile.finish();
        if (val) validate();
        if (sample) {
            watchdog.begins("sample at step", t.step);
            log.sample(t.step, t.sample());
        }
        if (checkpoint) save();
    }
}

// After an error: the steps that are done, in a checkpoint. The log hears nothing: it may be what failed. Returns what to
// add to the error's line.
std::string Loop::rescue() {
    while (t.in_flight() > 0) {
        const StepResult r = t.finish_step();
        sound &= std::isfinite(r.loss) && std::isfinite(r.grad_norm);
    }
    try {
        if (sound && t.options.checkpoint_every >= 0 && t.step > saved_step) saved = t.save();
    } catch (const Error&) {  // for the reason that is reported anyway
    }
    return saved.empty() ? "; there is no checkpoint" : "; the last checkpoint is " + saved;
}

void Loop::run() {
    try {
        try {
            run_steps();
        } catch (const Stopped&) {
            stopped = true;
        }
        finish(0);
        profile.finish();
        log.print_usage();
        if (t.options.checkpoint_every >= 0 && t.step > saved_step) save();
    } catch (const Error& error) {
        fail(error.what(), rescue());
    }
}

// The loop's checkpoint of the last step, if there is one, and the signal that ended it, if one did.
std::pair<std::string, int> train(Trainer& t, Log& log, double peak) {
    Loop loop(t, log, peak);
    loop.run();
    return {t.step == loop.saved_step ? loop.saved : "", loop.stopped ? stop_signal() : 0};
}

int run_training(const Options& options) {
    if (options.train_data.empty()) fail("--train-data: expected a pattern of files, found none");
    const Backend backend =
        computing_context().backend;  // a machine without the device is told so before any work
    Trainer t(options);
    if (options.dry_run) return finish_dry_run(t);
    answer_stop_signals();
    const std::string moved = prepare_output(options.out, t.resumed_from, t.step);
    const RunShape shape{options.steps,
                         static_cast<double>(t.tokens_per_step()),
                         flops_per_token(t.config, options.seq_len),
                         peak_flops(t.model.options.precision.weights),
                         backend == Backend::device,
                         options.log_every};
    Log log(options.out, shape);
    if (!moved.empty()) log.print(moved);
    describe(log, t);
    if (!t.warnings.empty()) log.print(t.warnings);
    if (!t.resumed_from.empty()) log.print("resuming from " + t.resumed_from);
    log.describe_run(computing_device(), count_parameters(t.config));
    log.start(to_json(options));
    const auto [saved, signal] = train(t, log, shape.peak_flops);
    const std::string plot = draw_loss_plot(options.out);
    log.print((signal ? std::string("interrupted by ") + signal_name(signal) : "done") + ": " +
              (saved.empty() ? "no model" : "model " + saved) + ", log " + options.out + "/log.jsonl, " +
              plot);
    return signal ? exit_code_of(signal) : 0;
}

int run_program(int argc, char** argv) {
    const Options options = parse_options(argc, argv);
    if (options.list_kernels)
        list_kernels();
    else if (options.print_config)
        std::fputs(to_toml(options).c_str(), stdout);
    else
        return run_training(options);
    return 0;
}

}  // namespace
}  // namespace llamac

int main(int argc, char** argv) {
    llamac::limit_spinning(argv);
    llamac::ignore_write_signals();
    llamac::allow_many_files();
    try {
        return llamac::run_program(argc, argv);
    } catch (const llamac::Error& error) {
        std::fprintf(stderr, "train_llama3: %s\n", error.what());
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr, "train_llama3: out of memory\n");
    }
    return 2;
}
