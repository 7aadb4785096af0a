#include "train/profile.h"

#include <algorithm>
#include <bitset>
#include <cmath>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>
#include <vector>

#include "core/dispatch.h"
#include "core/file.h"
#include "core/observer.h"
#include "core/operation.h"
#include "core/words.h"
#include "platform/stream.h"
#include "platform/terminal.h"
#include "train/peak.h"

namespace llamac {

constexpr const char* copy_name = "copy";
constexpr size_t max_variants = 64;  // of an operation

// A call, a copy or a collective, between two events on its stream.
struct ProfiledCall {
    const Operation* op;        // null: a copy or a collective
    const Variant* variant;     // likewise
    const char* other;          // the name of these
    std::vector<int64_t> size;  // of the operation's dimensions
    double flops, bytes;
    hipStream_t stream;
    std::bitset<max_variants> takers;  // the operation's variants that take the call
    const Event *begin = nullptr, *end = nullptr;
    size_t step = 0;              // index of the profiled step
    double start_us = 0, us = 0;  // from the first step's begin; known once the events are read

    bool is_collective() const { return !op && other != copy_name; }
};
struct ProfiledStep {
    int64_t number;
    const Event *begin, *end;
    double start_us = 0, us = 0;
};

namespace {

using nlohmann::ordered_json;

struct Total {
    int64_t calls = 0;
    double seconds = 0, flops = 0, bytes = 0;

    void add(const ProfiledCall& s) {
        calls++;
        seconds += 1e-6 * s.us;
        flops += s.flops;
        bytes += s.bytes;
    }
};

std::string operation_of(const ProfiledCall& s) {
    return s.op ? s.op->name : s.other;
}
std::string variant_of(const ProfiledCall& s) {
    return s.variant ? s.variant->name : "";
}
// "N=2048 C=192"
std::string shape_of(const ProfiledCall& s) {
    std::string text;
    for (size_t d = 0; d < s.size.size(); d++)
        text += (d ? " " : "") + s.op->dimensions[d].name + "=" + std::to_string(s.size[d]);
    return text;
}

std::string device_name() {
    return computing_context().backend == Backend::host ? "CPU" : device_properties().name;
}

// Events resolve nanoseconds at best.
double rounded(double us) {
    return std::round(us * 1e3) / 1e3;
}

}  // namespace

struct Recording {
    std::deque<Event> events;  // stay where they are
    std::vector<ProfiledCall> spans;
    std::vector<ProfiledStep> steps;
    const Event* begin = nullptr;  // of the call under way
    int depth = 0;                 // calls within calls
    const Observer observer = {
        [this](hipStream_t stream) { before(stream); },
        [this](const Call& call, const Variant& variant) { after(call, variant); },
        [this](int64_t bytes, hipStream_t stream) { after_other(copy_name, bytes, stream); },
        [this](const char* name, int64_t bytes, hipStream_t stream) { after_other(name, bytes, stream); },
    };

    const Event* record(hipStream_t stream) {
        events.emplace_back().record(stream);
        return &events.back();
    }
    void before(hipStream_t stream) {
        if (depth++ == 0) begin = record(stream);
    }
    void after(const Call& call, const Variant& variant) {
        std::vector<int64_t> size(call.size, call.size + call.op->dimensions.size());
        std::bitset<max_variants> takers;
        for (size_t i = 0; i < call.op->variants.size(); i++) takers[i] = takes(call.op->variants[i], call);
        add({call.op, &variant, nullptr, std::move(size), least_flops(call), least_bytes(call),
             call.launch.stream, takers});
    }
    void after_other(const char* name, int64_t bytes, hipStream_t stream) {
        add({nullptr, nullptr, name, {}, 0, static_cast<double>(bytes), stream, {}});
    }
    void add(ProfiledCall span) {
        if (--depth > 0) return;
        span.begin = begin, span.end = record(span.stream);
        span.step = steps.size() - 1;
        spans.push_back(std::move(span));
    }

    void forget_last_step() {
        steps.pop_back();
        while (!spans.empty() && spans.back().step == steps.size()) spans.pop_back();
    }
    void read_times() {
        for (size_t k = 0; k < steps.size(); k++) {
            ProfiledStep& s = steps[k];
            s.end->wait();
            s.us = 1e3 * s.end->ms_since(*s.begin);
            if (k > 0) s.start_us = steps[k - 1].start_us + 1e3 * s.begin->ms_since(*steps[k - 1].begin);
        }
        // Against the step's own begin: an interval in milliseconds as a float is exact to nanoseconds only if short.
        for (ProfiledCall& s : spans) {
            s.end->wait();  // the stream may be another than the step's
            s.start_us = steps[s.step].start_us + 1e3 * s.begin->ms_since(*steps[s.step].begin);
            s.us = 1e3 * s.end->ms_since(*s.begin);
        }
    }
    double step_seconds() const {
        double us = 0;
        for (const ProfiledStep& s : steps) us += s.us;
        return 1e-6 * us;
    }
    // The part of the steps' time that no span on any stream covers.
    double idle_seconds() const {
        return step_seconds() - covered_seconds([](const ProfiledCall&) { return true; });
    }
    // The time of collectives without computation or copies.
    double exposed_seconds() const {
        const double alone = covered_seconds([](const ProfiledCall&) { return true; }) -
                             covered_seconds([](const ProfiledCall& s) { return !s.is_collective(); });
        return std::max(alone, 0.);  // sums round
    }

  private:
    // The part of the steps' time that the chosen spans cover, on any stream.
    template <class Choose>
    double covered_seconds(const Choose& choose) const {
        std::vector<std::pair<double, double>> busy;
        for (const ProfiledCall& s : spans)
            if (choose(s)) busy.push_back({s.start_us, s.start_us + s.us});
        std::sort(busy.begin(), busy.end());
        double covered = 0;
        for (const ProfiledStep& step : steps) {
            double at = step.start_us;
            const double end = step.start_us + step.us;
            for (const auto& [from, to] : busy) {
                if (from >= end) break;
                const double until = std::clamp(to, at, end);
                covered += until - std::max(at, std::min(from, until));
                at = until;
            }
        }
        return 1e-6 * covered;
    }
};

namespace {

// A total for each operation and variant, and beneath it for each shape.
struct Row {
    std::string operation, variant;
    Total total;
    std::map<std::string, Total> shapes;
    const Operation* op = nullptr;          // as of a call
    std::bitset<max_variants> takers = {};  // the variants that take all of its calls
};
std::vector<Row> rows_of(const std::vector<ProfiledCall>& spans) {
    std::map<std::pair<std::string, std::string>, Row> found;
    for (const ProfiledCall& s : spans) {
        const auto [at, is_new] = found.try_emplace({operation_of(s), variant_of(s)});
        Row& row = at->second;
        row.op = s.op;
        row.takers = is_new ? s.takers : row.takers & s.takers;
        row.operation = operation_of(s);
        row.variant = variant_of(s);
        row.total.add(s);
        row.shapes[shape_of(s)].add(s);
    }
    std::vector<Row> rows;
    for (auto& [key, row] : found) rows.push_back(std::move(row));
    std::stable_sort(rows.begin(), rows.end(),
                     [](const Row& a, const Row& b) { return a.total.seconds > b.total.seconds; });
    return rows;
}

void print_table(std::vector<Row> rows, double steps, double seconds, double idle, double exposed) {
    rows.push_back({"idle", "", {0, idle, 0, 0}, {}});
    if (exposed > 0) rows.push_back({"exposed communication", "", {0, exposed, 0, 0}, {}});
    size_t operation = columns("operation"), variant = columns("variant");
    for (const Row& row : rows) {
        operation = std::max(operation, columns(row.operation));
        variant = std::max(variant, columns(row.variant));
    }
    const auto print = [&](const Row& row, const std::string& numbers) {
        std::printf("%s %s %s\n", padded(row.operation, operation).c_str(),
                    padded(row.variant, variant).c_str(), numbers.c_str());
    };
    print({"operation", "variant", {}, {}}, "calls  ms/step  share  GFLOP/s    GB/s");
    for (const Row& row : rows) {
        const Total& t = row.total;
        const double rate = t.seconds > 0 ? 1e-9 / t.seconds : 0;
        print(row,
              formatted("%5.0f %8.3f %5.1f%% %8.1f %7.1f", static_cast<double>(t.calls) / steps,
                        1e3 * t.seconds / steps, 100 * t.seconds / seconds, t.flops * rate, t.bytes * rate));
    }
    std::fflush(stdout);
}

ordered_json total_json(ordered_json fields, const Total& t) {
    fields.update({{"calls", t.calls}, {"seconds", t.seconds}, {"flops", t.flops}, {"bytes", t.bytes}});
    return fields;
}

ordered_json or_null(double value) {
    return value > 0 ? ordered_json(value) : nullptr;
}

ordered_json profile_json(const std::vector<Row>& rows, size_t steps, double seconds, double idle,
                          double exposed, double peak_flops) {
    ordered_json operations = ordered_json::array();
    for (const Row& row : rows) {
        ordered_json shapes = ordered_json::array();
        for (const auto& [shape, total] : row.shapes) shapes.push_back(total_json({{"shape", shape}}, total));
        operations.push_back(total_json({{"operation", row.operation}, {"variant", row.variant}}, row.total));
        operations.back()["shapes"] = shapes;
        if (!row.op) continue;
        ordered_json& others = operations.back()["others"] = ordered_json::array();
        for (size_t i = 0; i < row.op->variants.size(); i++)
            if (row.takers[i] && row.variant != row.op->variants[i].name)
                others.push_back(row.op->variants[i].name);
    }
    return {{"device",
             {{"name", device_name()},
              {"gpu", computing_context().backend == Backend::device},
              {"peak_tflops", or_null(1e-12 * peak_flops)},
              {"copy_gbps", or_null(1e-9 * measure_copy_rate())}}},
            {"steps", steps},
            {"seconds", seconds},
            {"idle_seconds", idle},
            {"exposed_communication_seconds", exposed},
            {"operations", operations}};
}

// A complete event of the Chrome trace format, on a track of the one process.
ordered_json trace_event(const std::string& name, const char* category, int track, double start_us, double us,
                         const ordered_json& arguments) {
    return {{"name", name}, {"cat", category},         {"ph", "X"},          {"pid", 0},
            {"tid", track}, {"ts", rounded(start_us)}, {"dur", rounded(us)}, {"args", arguments}};
}
ordered_json track_name(int track, const std::string& name) {
    return {{"name", "thread_name"}, {"ph", "M"}, {"pid", 0}, {"tid", track}, {"args", {{"name", name}}}};
}

ordered_json trace_json(const std::vector<ProfiledStep>& steps, const std::vector<ProfiledCall>& spans,
                        hipStream_t main) {
    ordered_json events = {
        {{"name", "process_name"}, {"ph", "M"}, {"pid", 0}, {"args", {{"name", device_name()}}}},
        track_name(0, "steps")};
    for (const ProfiledStep& s : steps)
        events.push_back(trace_event("step " + std::to_string(s.number), "step", 0, s.start_us, s.us,
                                     ordered_json::object()));
    std::map<hipStream_t, int> tracks;
    const auto track_of = [&](hipStream_t stream) {
        const auto [at, is_new] = tracks.insert({stream, static_cast<int>(tracks.size()) + 1});
        if (is_new)
            events.push_back(track_name(
                at->second, stream == main ? "operations" : "stream " + std::to_string(at->second)));
        return at->second;
    };
    track_of(main);
    for (const ProfiledCall& s : spans) {
        ordered_json arguments;
        if (s.op) arguments = {{"variant", variant_of(s)}, {"shape", shape_of(s)}};
        if (s.us > 0 && s.flops > 0) arguments["TFLOP/s"] = 1e-6 * s.flops / s.us;
        if (s.us > 0) arguments["GB/s"] = 1e-3 * s.bytes / s.us;
        const int track = track_of(s.stream);
        events.push_back(trace_event(operation_of(s),
                                     s.op                ? "operation"
                                     : s.is_collective() ? "collective"
                                                         : "copy",
                                     track, s.start_us, s.us, arguments));
    }
    return {{"displayTimeUnit", "ms"}, {"traceEvents", events}};
}

}  // namespace

ProfiledSteps choose_profiled_steps(int64_t first, int64_t last, int64_t count) {
    const int64_t all = last - first + 1;
    return {first + (count > 0 && all > count ? 1 : 0), all > 0 ? count : 0};
}

Profile::Profile(const ProfiledSteps& steps_, Context& context_, const OpenFolder& out_, double peak,
                 bool records)
    : steps(steps_),
      context(context_),
      out(out_),
      peak_flops(peak),
      recording(records && steps_.count > 0 ? std::make_unique<Recording>() : nullptr) {}

Profile::~Profile() {
    if (recording && context.observer == &recording->observer) context.observer = nullptr;
}

void Profile::begin_step(int64_t step) {
    if (!recording || step < steps.first || step - steps.first >= steps.count) return;
    const Event* begin = recording->record(context.stream);
    recording->steps.push_back({step, begin, nullptr});
    context.observer = &recording->observer;
}

void Profile::end_step() {
    if (!recording || context.observer != &recording->observer) return;
    context.observer = nullptr;
    recording->steps.back().end = recording->record(context.stream);
}

bool Profile::ends_with(int64_t step) const {
    return steps.count > 0 && step - steps.first == steps.count - 1;
}

void Profile::finish() {
    const std::unique_ptr<Recording> r = std::move(recording);
    if (!r) return;
    if (context.observer == &r->observer) {  // the last step was abandoned on the way
        context.observer = nullptr;
        r->forget_last_step();
    }
    if (r->steps.empty()) return;
    r->read_times();
    const std::vector<Row> rows = rows_of(r->spans);
    const double seconds = r->step_seconds(), idle = r->idle_seconds(), exposed = r->exposed_seconds();
    print_table(rows, static_cast<double>(r->steps.size()), seconds, idle, exposed);
    const ordered_json profile = profile_json(rows, r->steps.size(), seconds, idle, exposed, peak_flops);
    write_file(out, "profile.json", profile.dump(2) + "\n");
    write_file(out, "trace.json", trace_json(r->steps, r->spans, context.stream).dump() + "\n");
}

}  // namespace llamac
