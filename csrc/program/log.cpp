#include "program/log.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstring>
#include <ctime>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/file.h"
#include "core/folder.h"
#include "core/words.h"
#include "platform/error.h"
#include "platform/terminal.h"
#include "program/stop.h"
#include "run/version.h"

namespace llamac {
namespace {

using nlohmann::ordered_json;

// "2026-11-23T09:05:07.042Z".
std::string utc_time() {
    using namespace std::chrono;
    const int64_t ms = duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
    const std::time_t seconds = ms / 1000;
    std::tm utc{};
    gmtime_r(&seconds, &utc);
    char text[32];
    std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
    return text + formatted(".%03dZ", static_cast<int>(ms % 1000));
}

std::string host_name() {
    char name[256] = "";
    return gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

// Bytes that are not UTF-8 become U+FFFD; infinities and NaN become null.
std::string json_line(const ordered_json& object) {
    return object.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

// The columns of the table of steps. On a narrow terminal, those of the highest rank are left out first; 0: never.
struct StepColumn {
    size_t width;
    int rank;
};
enum : size_t { number_column, rate_column = 6, peak_column };
constexpr StepColumn step_columns[] = {{0, 0}, {8, 0}, {9, 2}, {8, 4}, {8, 1},
                                       {9, 0}, {8, 5}, {9, 0}, {7, 3}, {9, 0}};

// The values reported by a device's driver, by name.
ordered_json known(const Sensors& s) {
    ordered_json object = ordered_json::object();
    const std::pair<const char*, double> all[] = {{"watts", s.watts},
                                                  {"celsius", s.celsius},
                                                  {"clock_mhz", s.clock_mhz},
                                                  {"memory_clock_mhz", s.memory_clock_mhz},
                                                  {"ecc_corrected", s.ecc_corrected},
                                                  {"ecc_uncorrected", s.ecc_uncorrected}};
    for (const auto& [name, value] : all)
        if (!std::isnan(value)) object[name] = value;
    return object;
}

ordered_json fields_of(const Usage& usage) {
    ordered_json fields = {{"gpu_mem_gib", usage.gpu_mem_gib},
                           {"gpu_percent", usage.gpu_percent},
                           {"rss_gib", usage.rss_gib},
                           {"system_mem_gib", usage.system_mem_gib},
                           {"cpu_percent", usage.cpu_percent}};
    if (const ordered_json device = known(usage.sensors); !device.empty()) fields["device"] = device;
    return fields;
}

}  // namespace

std::string usage_text(const Usage& usage) {
    ordered_json fields = {{"host", host_name()}};
    fields.update(fields_of(usage));
    return json_line(fields);
}

// For PIPE_BUF bytes of a pipe. A signal ends the wait: the run has better things to do then.
bool Console::has_room(int descriptor, int milliseconds) const {
    constexpr int slice = 100;  // a signal before poll() does not end it
    for (int waited = 0;; waited += slice) {
        pollfd ready{descriptor, POLLOUT, 0};
        const int n = poll(&ready, 1, std::min(slice, milliseconds));
        if (n > 0) return true;
        if ((n < 0 && errno != EINTR) || waited >= milliseconds || stop_signal() != 0) return false;
    }
}

void Console::write(const std::string& line) {
    std::fflush(stream);
    const int descriptor = fileno(stream);
    if (descriptor < 0) {
        std::fwrite(line.data(), 1, line.size(), stream);
        std::fflush(stream);
        return;
    }
    // Long enough for any reader that reads at all; once it does not, no further line waits.
    constexpr int patience = 1000;
    if (!has_room(descriptor, dropped > 0 ? 0 : patience)) {
        dropped++;
        return;
    }
    std::string text = line;
    if (dropped > 0) text = "(" + std::to_string(dropped) + " unread lines were left out)\n" + text;
    dropped = 0;
    for (size_t done = 0; done < text.size();) {
        if (done > 0 && !has_room(descriptor, patience)) return;
        const ssize_t written =
            ::write(descriptor, text.data() + done, std::min(text.size() - done, size_t{PIPE_BUF}));
        if (written < 0 && errno == EINTR) continue;
        if (written < 0 && errno == EAGAIN) continue;
        if (written <= 0) return;
        done += static_cast<size_t>(written);
    }
}

Log::Log(const std::string& out, const RunShape& run_shape, std::FILE* to)
    : path(out.empty() ? "/dev/null" : out + "/log.jsonl"),
      file(
          uninterrupted([&] { return open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666); })),
      console(to),
      run(run_shape) {
    if (file.fd < 0) fail_with_errno(path, "write");
    terminal = terminal_columns(to);
}

bool Log::is_in_place() const {
    struct stat own, there;
    return fstat(file.fd, &own) == 0 && stat(path.c_str(), &there) == 0 && own.st_dev == there.st_dev &&
           own.st_ino == there.st_ino;
}

void Log::flush() {
    if (pending.empty()) return;
    if (before_write) before_write();
    if (!is_in_place()) {
        if (before_write) before_write();  // the folder may have gone meanwhile
        fail(path, ": expected the log of this run, found ", exists(path) ? "another file" : "none",
             ": it was removed or replaced while the run was writing it");
    }
    while (!pending.empty()) {
        const ssize_t done = uninterrupted([&] { return write(file.fd, pending.data(), pending.size()); });
        if (done == 0) errno = ENOSPC;
        if (done <= 0) fail_with_errno(path, "write");
        pending.erase(0, static_cast<size_t>(done));
    }
}

void Log::event(const ordered_json& fields) {
    ordered_json stamped = {{"event", fields.at("event")}, {"time", utc_time()}};
    stamped.update(fields);
    pending += json_line(stamped) + "\n";
    flush();
}

void Log::print_as_is(const std::string& text) {
    console.write(printable(ordered_json::parse(json_line(text)).get<std::string>()) + "\n");
}

void Log::print(const std::string& text) {
    if (!terminal) return print_as_is(text);
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);)
        print_as_is(wrapped(line, *terminal, std::min(line.find_first_not_of(' '), line.size()) + 2));
}

void Log::table(const std::string& heading, const Rows& rows) {
    print(heading);
    size_t key = 0, value = 0;
    for (const auto& row : rows) {
        key = std::max(key, columns(row.first));
        value = std::max(value, columns(row.second));
    }
    const size_t cell = key + value + 6;
    const size_t across = std::max<size_t>(1, terminal.value_or(default_columns) / cell);
    const size_t down = (rows.size() + across - 1) / across;
    for (size_t i = 0; i < down; i++) {
        std::string line;
        for (size_t j = i; j < rows.size(); j += down)
            line += "  " + padded(rows[j].first, key) + "  " + padded(rows[j].second, value) + "  ";
        print(line.substr(0, line.find_last_not_of(' ') + 1));
    }
}

void Log::memory(const std::vector<MemoryRow>& rows) {
    MemoryRow total{"total"};
    size_t group = columns("memory");
    for (const MemoryRow& row : rows) {
        group = std::max(group, columns(row.group));
        if (row.is_on_host) continue;
        total.tensors += row.tensors;
        total.bytes += row.bytes;
    }
    const auto print_row = [&](const MemoryRow& row) {
        const double mib = static_cast<double>(row.bytes) / (1 << 20);
        print("  " + padded(row.group, group) +
              formatted("  %8lld  %12.1f", static_cast<long long>(row.tensors), mib));
    };
    print(padded("memory", group + 2) + "   tensors           MiB");
    for (const MemoryRow& row : rows)
        if (!row.is_on_host) print_row(row);
    print_row(total);
    for (const MemoryRow& row : rows)
        if (row.is_on_host) print_row(row);
}

void Log::describe_run(const std::string& device, int64_t parameters, int64_t ranks, const Origin& origin) {
    ordered_json from;  // null where there is none
    if (!origin.from.empty()) from = origin.from;
    event({{"event", "run"},
           {"host", host_name()},
           {"device", device},
           {"version", version_number()},
           {"commit", version_commit()},
           {"origin", origin.kind},
           {"from", from},
           {"parameters", parameters},
           {"ranks", ranks},
           {"tokens_per_step", static_cast<int64_t>(run.tokens_per_step)},
           {"tokens_per_epoch", run.tokens_per_epoch}});
}

void Log::start(const ordered_json& config) {
    ordered_json fields = {{"event", "start"}};
    fields.update(config);
    event(fields);
    print(step_row({"step", "loss", "grad norm", "lr", "ms", "tokens/s", run.gpu ? "TFLOP/s" : "GFLOP/s",
                    "% of peak", "mem GiB", "time left"}));
}

std::string Log::step_number(int64_t step) const {
    const std::string last = std::to_string(run.steps);
    return formatted("%*s", static_cast<int>(2 * last.size() + 1),
                     (std::to_string(step) + "/" + last).c_str());
}

std::string Log::step_row(const std::vector<std::string>& cells) const {
    const auto row = [&](int highest) {
        std::string line;
        for (size_t i = 0; i < cells.size(); i++) {
            const auto [width, rank] = step_columns[i];
            if (rank > highest || (i == peak_column && run.peak_flops == 0)) continue;
            const size_t least = i == number_column ? columns(step_number(0)) : width;
            line += formatted("%*s", static_cast<int>(least), cells[i].c_str()) + "  ";
        }
        return line.substr(0, line.size() - 2);
    };
    int highest = 5;
    while (highest > 0 && columns(row(highest)) > terminal.value_or(default_columns)) highest--;
    return row(highest);
}

void Log::startup(const StartTimes& s) {
    event({{"event", "startup"},
           {"ranks", s.ranks},
           {"weights", s.weights},
           {"tuning", s.tuning},
           {"graphs", s.graphs},
           {"first_step", s.first_step},
           {"total", s.total}});
    print(formatted(
        "start: %.1f s to the end of the first step, which took %.1f s; ranks %.1f s, weights %.1f s, "
        "tuning %.1f s, graphs %.1f s",
        s.total, s.first_step, s.ranks, s.weights, s.tuning, s.graphs));
}

void Log::step(const StepResult& r, const Usage& usage) {
    const double speed = run.tokens_per_step / r.ms * 1e3, flops = speed * run.flops_per_token;
    // The measured peak of a CPU, above all of a busy one, may be less than the rate of a step.
    if (!run.gpu && run.peak_flops > 0) run.peak_flops = std::max(run.peak_flops, flops);
    ordered_json mfu;  // null where the peak is not known
    if (run.peak_flops > 0) mfu = flops / run.peak_flops;
    ordered_json fields = {
        {"event", "step"}, {"step", r.step}, {"loss", r.loss},        {"grad_norm", r.grad_norm},
        {"lr", r.lr},      {"ms", r.ms},     {"tokens_per_s", speed}, {"tflops", flops / 1e12},
        {"mfu", mfu}};
    fields.update(fields_of(usage));
    if (r.loss_scale > 0) fields["loss_scale"] = r.loss_scale;
    if (r.skipped) fields["skipped"] = true;
    event(fields);
    count_usage(usage, r.ms);
    count_saturated(r);
    const bool first = typical_ms == 0, last = r.step == run.steps;
    typical_ms = typical_ms == 0 ? r.ms : 0.9 * typical_ms + 0.1 * r.ms;
    if (!first && !last && !r.skipped && r.step % run.log_every != 0) return;
    const double left = static_cast<double>(run.steps - r.step) * typical_ms / 1e3;
    // The device's; where the host computes, the process's at its peak.
    const double memory = run.gpu ? usage.gpu_mem_gib : usage.rss_gib;
    print(step_row({step_number(r.step), formatted("%.4f", r.loss), formatted("%.4f", r.grad_norm),
                    formatted("%.2e", r.lr), formatted("%.1f", r.ms), formatted("%.0f", speed),
                    formatted("%.1f", flops / (run.gpu ? 1e12 : 1e9)),
                    formatted("%.1f", 100 * flops / run.peak_flops), formatted("%.2f", memory),
                    duration(left)}) +
          (r.skipped ? "  skipped" : ""));
    saturated();
}

void Log::ranks(int64_t step, const std::vector<std::string>& usages) {
    ordered_json all = ordered_json::array();
    for (const std::string& usage : usages) all.push_back(ordered_json::parse(usage));
    event({{"event", "ranks"}, {"step", step}, {"ranks", all}});
}

void Log::count_saturated(const StepResult& r) {
    last_step = r.step;
    beyond_steps++;
    for (const Saturated& s : r.saturated) {
        Saturated& sum = beyond[s.tensor];
        sum = {s.tensor, sum.values + s.values, s.of};
    }
}

void Log::saturated() {
    const auto share = [&](const Saturated& s) {
        return static_cast<double>(s.values) / static_cast<double>(s.of) / static_cast<double>(beyond_steps);
    };
    ordered_json values;
    const Saturated* worst = nullptr;
    int64_t many = 0;
    for (const auto& [name, s] : beyond) {
        values[name] = s.values;
        if (!worst || share(s) > share(*worst)) worst = &s;
        many += share(s) > max_saturated;
    }
    if (worst)
        event({{"event", "saturated"},
               {"step", last_step},
               {"steps", beyond_steps},
               {"values", values},
               {"worst", worst->tensor},
               {"share", share(*worst)}});
    if (many > 0)
        note(last_step, formatted("saturated: %.3g%% of %s", 100 * share(*worst), worst->tensor.c_str()) +
                            " lies beyond fp8's largest value" +
                            (many > 1 ? formatted("; over %.2g%% in %lld tensors", 100 * max_saturated,
                                                  static_cast<long long>(many))
                                      : ""));
    beyond.clear();
    beyond_steps = 0;
}

void Log::note(int64_t step, const std::string& text) {
    print(step_number(step) + "  " + text);
}

void Log::spike(int64_t step, const Spike& s) {
    event({{"event", "spike"},
           {"step", step},
           {"quantity", s.quantity},
           {"found", s.found},
           {"expected", s.expected},
           {"allowed", s.allowed}});
    note(step, formatted("spike: %s %.4f, expected about %.4f, at most %.4f", s.quantity, s.found, s.expected,
                         s.allowed));
}

void Log::val(int64_t step, double loss, double bytes_per_target) {
    ordered_json fields = {{"event", "val"}, {"step", step}, {"loss", loss}};
    if (!std::isnan(bytes_per_target)) fields["bits_per_byte"] = loss / std::log(2.0) / bytes_per_target;
    event(fields);
    note(step, formatted("%8.4f  validation", loss));
}

void Log::evaluation(int64_t step, const Score& s) {
    const std::optional<double>& norm = s.accuracy_norm;
    event({{"event", "evaluation"},
           {"step", step},
           {"task", s.task},
           {"accuracy", s.accuracy},
           {"accuracy_norm", norm ? ordered_json(*norm) : ordered_json()},
           {"questions", s.questions}});
    note(step, formatted("%8.4f  accuracy", s.accuracy) + (norm ? formatted(", %.4f by length", *norm) : "") +
                   ": " + s.task + ", " + grouped(s.questions) + " questions");
}

void Log::sample(int64_t step, const std::string& text) {
    event({{"event", "sample"}, {"step", step}, {"text", text}});
    print_as_is("--- sample at step " + std::to_string(step) + "\n" + text + "\n---");
}

void Log::checkpoint(int64_t step, const std::string& directory, double pause_ms) {
    event({{"event", "checkpoint"}, {"step", step}, {"path", directory}, {"ms", pause_ms}});
    note(step, "checkpoint " + directory);
}

void Log::count_usage(const Usage& u, double step_ms) {
    used.gpu_mem_gib = std::max(used.gpu_mem_gib, u.gpu_mem_gib);
    used.rss_gib = std::max(used.rss_gib, u.rss_gib);
    used.system_mem_gib = std::max(used.system_mem_gib, u.system_mem_gib);
    used.cpu_percent += step_ms * u.cpu_percent;
    ms += step_ms;
    if (std::isnan(u.gpu_percent)) return;
    used.gpu_percent += step_ms * u.gpu_percent;
    gpu_known_ms += step_ms;
}

void Log::print_usage() {
    if (ms == 0) return;
    std::string line = "used: ";
    if (used.gpu_mem_gib > 0) line += formatted("GPU memory %.1f GiB, ", used.gpu_mem_gib);
    if (gpu_known_ms > 0) line += formatted("GPU %.0f%% busy, ", used.gpu_percent / gpu_known_ms);
    print(line + formatted("process %.1f GiB, system %.1f GiB, CPU %.0f%%", used.rss_gib, used.system_mem_gib,
                           used.cpu_percent / ms));
}

std::string duration(double seconds) {
    if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e15) return "-";
    const long long s = std::llround(seconds);
    if (s < 60) return formatted("%lld s", s);
    if (s < 3600) return formatted("%lld:%02lld", s / 60, s % 60);
    return formatted("%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
}

std::string grouped(int64_t number) {
    std::string text = std::to_string(number);
    const int64_t first = number < 0 ? 1 : 0;
    for (int64_t i = static_cast<int64_t>(text.size()) - 3; i > first; i -= 3)
        text.insert(static_cast<size_t>(i), ",");
    return text;
}

}  // namespace llamac
