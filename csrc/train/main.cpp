// train_llama3: the loop of a training run. Flags: options.h; one step: trainer.h; what it prints: log.h.
#include <cmath>
#include <csignal>
#include <new>

#include "core/registry.h"
#include "platform/threads.h"
#include "train/log.h"
#include "train/memory.h"
#include "train/peak.h"
#include "train/plot.h"
#include "train/profile.h"
#include "train/resume.h"
#include "train/trainer.h"

namespace llamac {
namespace {

volatile std::sig_atomic_t interrupted = 0;

void on_signal(int) {
    interrupted = 1;
}

// Ctrl-C ends the run after the step that is under way, with a checkpoint; a second one ends it at once.
void handle_signals() {
    struct sigaction action{};
    action.sa_handler = on_signal;
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    sigaction(SIGINT, &action, nullptr);
    sigaction(SIGTERM, &action, nullptr);
}

std::string computing_device() {
    if (computing_context().backend == Backend::host)
        return "CPU, " + std::to_string(host_threads()) + " threads";
    return device_properties().name;
}

Origin origin_of(const Trainer& t) {
    if (!t.resumed_from.empty()) return {"resumed", t.resumed_from};
    if (t.options.init == "load") return {"loaded", t.options.model};
    return {};
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

void validate(Trainer& t, Log& log) {
    if (t.val) log.val(t.step, t.validate());
}

// The loop proper, to its end or a signal. Returns the checkpoint of the last step; "": there is none.
std::string train(Trainer& t, Log& log, double peak) {
    const Options& o = t.options;
    const bool checkpoints = o.checkpoint_every >= 0;
    int64_t saved_step = t.step;
    std::string saved = t.resumed_from;
    const auto save_now = [&] {
        saved_step = t.step;
        saved = t.save();
        log.checkpoint(t.step, saved);
    };
    if (t.step == 0) validate(t, log);
    UsageMeter usage;
    Profile profile(choose_profiled_steps(t.step + 1, o.steps, o.profile), t.model.context, o.out, peak);
    const auto finish = [&](int64_t in_flight) {
        while (t.in_flight() > in_flight) {
            const StepResult r = t.finish_step();
            log.step(r, usage.read());
            // Every weight is as bad from here on, and the next checkpoints would replace the good ones.
            if (std::isfinite(r.loss) && std::isfinite(r.grad_norm)) continue;
            while (t.in_flight() > 0) t.finish_step();  // its memory goes with the trainer
            fail("step ", r.step, ": expected a finite loss and gradient norm, found ", r.loss, " and ",
                 r.grad_norm, "; ",
                 saved.empty() ? "there is no checkpoint" : "the last checkpoint is " + saved);
        }
    };
    while (t.step < o.steps && !interrupted) {
        profile.begin_step(t.step + 1);
        t.start_step();
        profile.end_step();
        const bool last = t.step == o.steps;
        const bool val = last || is_due(o.val_every, t.step),
                   save = checkpoints && (last || is_due(o.checkpoint_every, t.step));
        const bool sample = o.sample_every > 0 && (last || is_due(o.sample_every, t.step));
        finish(val || save || sample || profile.is_complete() ? 0 : t.most_in_flight);
        if (profile.is_complete()) profile.finish();
        if (val) validate(t, log);
        if (sample) log.sample(t.step, t.sample());
        if (save) save_now();
    }
    finish(0);
    profile.finish();
    log.print_usage();
    if (checkpoints && t.step > saved_step) save_now();
    return t.step == saved_step ? saved : "";
}

int run_training(const Options& options) {
    if (options.train_data.empty()) fail("--train-data: expected a pattern of files, found none");
    const Backend backend =
        computing_context().backend;  // a machine without the device is told so before any work
    Trainer t(options);
    if (options.dry_run) return finish_dry_run(t);
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
    log.describe_run(computing_device(), count_parameters(t.config), origin_of(t));
    log.start(to_json(options));
    handle_signals();
    const std::string saved = train(t, log, shape.peak_flops), plot = draw_loss_plot(options.out);
    const bool complete = t.step >= options.steps;
    log.print(std::string(complete ? "done: " : "interrupted: ") +
              (saved.empty() ? "no model" : "model " + saved) + ", log " + options.out + "/log.jsonl, " +
              plot);
    return complete ? 0 : 130;
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
    try {
        return llamac::run_program(argc, argv);
    } catch (const llamac::Error& error) {
        std::fprintf(stderr, "train_llama3: %s\n", error.what());
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr, "train_llama3: out of memory\n");
    }
    return 2;
}
