// The log of a run: OUT/log.jsonl with one JSON object per event and line, and the same information on the console,
// as wide as its terminal.
#pragma once
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "core/file.h"
#include "platform/usage.h"
#include "program/spikes.h"
#include "run/options.h"
#include "train/memory.h"
#include "train/score.h"
#include "train/trainer.h"

namespace llamac {

// Lines on the console. A closed or blocked reader neither ends nor delays the run.
struct Console {
    explicit Console(std::FILE* to) : stream(to) {}

    // Writes a line, or drops it if the console is closed, fails or blocks; the next line that gets through says how many
    // were dropped.
    void write(const std::string& line);

  private:
    bool has_room(int descriptor, int milliseconds) const;

    std::FILE* stream;  // of a file, or a buffer in memory
    int64_t dropped = 0;
};

struct RunShape {
    int64_t steps = 0;           // the last step's number
    double tokens_per_step = 0;  // over all devices
    double flops_per_token = 0;
    double peak_flops = 0;         // per second, of all devices together; 0: not known, no "% of peak"
    bool gpu = false;              // TFLOP/s on the console, else GFLOP/s
    int64_t log_every = 1;         // steps per line on the console, besides the first and the last one
    int64_t tokens_per_epoch = 0;  // of the training data
};

// The origin of a run's weights.
struct Origin {
    std::string kind = "fresh";  // or "resumed", "loaded"
    std::string from = "";       // the folder; "": none
};

struct Log {
    // Appends to out/log.jsonl (cut back by truncate_log.h), with out "" to no file, and prints to `console`. Throws
    // Error with the path where a line cannot be written.
    Log(const std::string& out, const RunShape& run, std::FILE* console = stdout);

    // Lines for people, wrapped where a terminal shows them.
    void print(const std::string& text);
    // A text to copy.
    void print_as_is(const std::string& text);
    // Key and value side by side, as many columns of them as fit.
    void table(const std::string& heading, const Rows& rows);
    void memory(const std::vector<MemoryRow>& rows);

    // The first event of a run: device, number of parameters and ranks, origin of the weights.
    void describe_run(const std::string& device, int64_t parameters, int64_t ranks = 1,
                      const Origin& origin = {});
    // The event with the resolved configuration, then the heading of the table of steps.
    void start(const nlohmann::ordered_json& config);
    // The event `startup`, and a line.
    void startup(const StartTimes& seconds);
    // Saturated values are an event and, beyond max_saturated, a line; both only for steps with a line on the console.
    void step(const StepResult& result, const Usage& usage = {});
    // The event of all ranks' use of resources: usage_text() of each.
    void ranks(int64_t step, const std::vector<std::string>& usages);
    // The event of saturated values since the last one.
    void saturated();
    void spike(int64_t step, const Spike& spike);
    // bytes_per_target: of text, for bits per byte; NaN: not known.
    void val(int64_t step, double loss, double bytes_per_target = Sensors::not_known);
    void evaluation(int64_t step, const Score& score);
    void sample(int64_t step, const std::string& text);  // any bytes; invalid UTF-8 becomes U+FFFD
    // pause_ms: the pause of training.
    void checkpoint(int64_t step, const std::string& path, double pause_ms);
    // Prints peak memory and mean utilization of the steps in one line.
    void print_usage();

    // Writes events that could not be written before. Throws Error if that fails again.
    void flush();
    Log(const Log&) = delete;

    std::function<void()> before_write;  // throws if the folder is no longer the run's

  private:
    bool is_in_place() const;
    // Writes the fields behind the time.
    void event(const nlohmann::ordered_json& fields);
    void note(int64_t step, const std::string& text);
    std::string step_number(int64_t step) const;  // "7/300"
    // The cells of all columns, of which those that fit are shown.
    std::string step_row(const std::vector<std::string>& cells) const;
    void count_usage(const Usage& usage, double step_ms);
    void count_saturated(const StepResult& result);

    std::string path;
    Descriptor file;
    std::string pending;  // bytes still to write
    Console console;
    std::optional<size_t> terminal = {};  // its columns; none: the console is a file or a pipe
    RunShape run;
    double typical_ms = 0;  // running mean: one slow step does not move the time left
    Usage used = {};        // memory: the most of any step; percentages: the sum of ms * percent
    double ms = 0, gpu_known_ms = 0;
    std::map<std::string, Saturated> beyond;  // since the last event of them
    int64_t beyond_steps = 0, last_step = 0;
};

// The share of a tensor's values beyond fp8's largest that the console warns of.
constexpr double max_saturated = 1e-3;

// This process's host and use of resources, as JSON.
std::string usage_text(const Usage& usage);
// "12 s", "3:05", "7:02:05".
std::string duration(double seconds);
// 1234567 as "1,234,567".
std::string grouped(int64_t number);

}  // namespace llamac
