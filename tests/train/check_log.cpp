// The log: what is written reads back, and a log that was cut short or is malformed is refused or cut back.
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "check.h"
#include "checkpoint/truncate_log.h"
#include "program/log.h"

using namespace llamac;
namespace fs = std::filesystem;
using nlohmann::json;

namespace log_checks {
namespace {

// Without their times, which have to be there.
std::vector<json> events_of(const std::string& path) {
    std::vector<json> events;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        events.push_back(json::parse(line));
        const std::string time = events.back().value("time", "");
        std::string form = time;
        for (char& c : form)
            if (std::isdigit(static_cast<unsigned char>(c))) c = '9';
        check(form == "9999-99-99T99:99:99.999Z", "time of an event: " + time);
        events.back().erase("time");
    }
    return events;
}

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}

// What f writes to a console.
std::string shown_by(const std::function<void(std::FILE*)>& f) {
    char* text = nullptr;
    size_t size = 0;
    std::FILE* const console = open_memstream(&text, &size);
    f(console);
    std::fclose(console);
    const std::string shown(text, size);
    std::free(text);
    return shown;
}

TEST(check_log) {
    const std::string out = fresh_folder("log");
    const std::string shown = shown_by([&](std::FILE* console) {
        Log log(out, {20, 2048, 1e9, 1e13, true}, console);
        for (const auto& [heading, rows] : configuration_rows(Options())) log.table(heading, rows);
        log.memory({{"weights", 38, 10 << 20}, {"activations", 7, 1 << 19}});
        log.start(to_json(Options()));
        log.val(0, 8.3);
        log.step({1, 8.0, 1.5, 1e-3, 1000.0}, {2.5, 90, 0.25, 4.5, 150});
        const double nan = std::numeric_limits<double>::quiet_NaN();
        log.step({2, nan, 1.5, 1e-3, 500.0}, {3, nan, 0.375, 4, 75});
        log.evaluation(2, {"piqa", 1838, 0.5, 0.25});
        log.evaluation(2, {"winogrande", 1, 0.5, {}});
        log.sample(2, "def f():\n\t\"\xff\x1b[2J\u009b");
        log.checkpoint(2, out + "/step_000002", 12.5);
        log.print_usage();
    });

    const auto events = events_of(out + "/log.jsonl");
    check(events.size() == 8, "one line an event");
    check(events[0]["event"] == "start" && events[0]["batch-size"] == 8 &&
          events[0].size() == to_json(Options()).size() + 1);
    check(events[1] == json{{"event", "val"}, {"step", 0}, {"loss", 8.3}}, "val event");
    const std::vector<std::string> names = {
        "event",       "step",         "loss",           "grad_norm",  "lr",
        "ms",          "tokens_per_s", "tflops",         "mfu",        "gpu_mem_gib",
        "gpu_percent", "rss_gib",      "system_mem_gib", "cpu_percent"};
    const json& step = events[2];
    check(step.size() == names.size(), "fields of a step");
    for (const std::string& name : names) check(step.contains(name), "a step's " + name);
    check(step["step"] == 1 && step["tokens_per_s"] == 2048.0 && step["gpu_mem_gib"] == 2.5, "step event");
    check(std::abs(step["tflops"].get<double>() - 2.048) < 1e-12 &&
          std::abs(step["mfu"].get<double>() - 0.2048) < 1e-12);
    check(step["gpu_percent"] == 90.0 && step["rss_gib"] == 0.25 && step["system_mem_gib"] == 4.5 &&
          step["cpu_percent"] == 150.0);
    check(events[3]["loss"].is_null() && events[3]["gpu_percent"].is_null(), "NaN is null");
    check(events[4] == json{{"event", "evaluation"},
                            {"step", 2},
                            {"task", "piqa"},
                            {"accuracy", 0.5},
                            {"accuracy_norm", 0.25},
                            {"questions", 1838}} &&
          events[5]["accuracy_norm"].is_null());
    check(events[6] == json{{"event", "sample"}, {"step", 2}, {"text", "def f():\n\t\"\ufffd\x1b[2J\u009b"}});
    check(events[7] ==
          json{{"event", "checkpoint"}, {"step", 2}, {"path", out + "/step_000002"}, {"ms", 12.5}});

    check(shown.find("\ufffd\\x1b[2J\\xc2\\x9b\n") != shown.npos, "no escape sequence reaches the terminal");
    for (const char* part :
         {"1/20", "8.0000", "2.0", "20.5", "19 s", "mem GiB", "   2.50       19 s", "validation",
          "step_000002", "tokens/s", "0.5000  accuracy, 0.2500 by length: piqa, 1,838 questions", "TFLOP/s",
          "% of peak", "weight-decay", "10.5", "45",
          "GPU memory 3.0 GiB, GPU 90% busy, process 0.4 GiB, system 4.5 GiB, CPU 125%"})
        check(shown.find(part) != shown.npos, std::string("console shows ") + part);
    std::istringstream lines(shown);
    for (std::string line; std::getline(lines, line);)
        check(line.size() <= 110 + folder.size(), "110 columns: " + line);

    const std::string missing = folder + "/none";
    refused("log without a folder", {missing + "/log.jsonl", "No such file"}, [&] { Log(missing, {}); });
    if (access("/dev/full", W_OK) == 0) {
        const std::string full = fresh_folder("full");
        fs::create_symlink("/dev/full", full + "/log.jsonl");
        Log log(full, {10, 1, 1, 0, false}, stdout);
        refused("log on a full disk", {full, "No space left"}, [&] { log.val(1, 1.0); });
    }
    const std::string limited = fresh_folder("limited");
    {
        Log log(limited, {10, 1, 1, 0, false}, stdout);
        log.val(1, 1.0);
        const uint64_t inside_the_line = fs::file_size(limited + "/log.jsonl") + 9;
        const std::string message = error_with_file_limit(inside_the_line, [&] { log.val(2, 2.0); });
        check(message.find(limited) == 0 && message.find("File too large") != message.npos, message);
        log.flush();
        log.val(3, 3.0);
    }
    const auto kept = events_of(limited + "/log.jsonl");
    check(kept.size() == 3 && kept[1]["step"] == 2 && kept[2]["step"] == 3, "a line is written later");
    for (const bool replaced : {false, true}) {
        Log log(limited, {10, 1, 1, 0, false}, stdout);
        fs::remove(limited + "/log.jsonl");
        if (replaced) put("limited/log.jsonl", "");
        refused("a log that is gone", {limited + "/log.jsonl", replaced ? "another file" : "none", "removed"},
                [&] { log.val(4, 4.0); });
        put("limited/log.jsonl", "");
        int looks = 0;
        log.before_write = [&] {
            if (looks++) fail("the folder is gone");
        };
        refused("a folder that goes after it was looked for", {"the folder is gone"}, [&] { log.flush(); });
    }
    check(duration(0.4) == "0 s" && duration(59.6) == "1:00" && duration(185) == "3:05", "short durations");
    check(duration(25325) == "7:02:05" && duration(NAN) == "-" && duration(INFINITY) == "-");
    check(grouped(1) == "1" && grouped(999) == "999" && grouped(1000) == "1,000", "grouped");
    check(grouped(1234567) == "1,234,567" && grouped(-123456) == "-123,456" && grouped(123456) == "123,456");
}

// Skipped steps, spikes, readings of the device's driver, bits per byte, ranks: each only where there is something to log.
TEST(check_divergence) {
    const std::string out = fresh_folder("divergence");
    shown_by([&](std::FILE* console) {
        Log log(out, {20, 2048, 1e9, 0, true}, console);
        Usage usage;
        usage.sensors.watts = 700, usage.sensors.ecc_corrected = 3;
        log.step({1, NAN, 1.5, 1e-3, 1000.0, true}, usage);
        log.step({2, 8.0, 1.5, 1e-3, 1000.0, false});
        log.spike(2, {"loss", 8.0, 3.0, 3.5});
        log.val(2, 8.0, 2.0);
        log.ranks(2, {usage_text(usage), usage_text({})});
    });
    const auto events = events_of(out + "/log.jsonl");
    check(events[0]["skipped"] == true && !events[1].contains("skipped"), "a skipped step");
    check(events[0]["device"] == json{{"watts", 700.0}, {"ecc_corrected", 3.0}} &&
          !events[1].contains("device"));
    check(events[2] == json{{"event", "spike"},
                            {"step", 2},
                            {"quantity", "loss"},
                            {"found", 8.0},
                            {"expected", 3.0},
                            {"allowed", 3.5}});
    check(std::abs(events[3]["bits_per_byte"].get<double>() - 4 / std::log(2.0)) < 1e-12, "bits per byte");
    const json& ranks = events[4]["ranks"];
    check(ranks.size() == 2 && ranks[0]["device"] == events[0]["device"] && !ranks[1].contains("device") &&
              ranks[0]["cpu_percent"] == 0.0 && ranks[1]["host"] == ranks[0]["host"],
          "readings of each rank");
}

// With one line per two steps: counts of both, and the console warns of what is beyond its limit.
TEST(check_saturated) {
    const std::string out = fresh_folder("saturated");
    const std::string shown = shown_by([&](std::FILE* console) {
        Log log(out, {20, 2048, 1e9, 0, true, 2}, console);
        const auto step = [&](int64_t number, const std::vector<Saturated>& saturated) {
            log.step({number, 8.0, 1.5, 1e-3, 1000.0, false, 0, saturated});
        };
        step(1, {});
        step(2, {{"0.swiglu", 1, 10000}});
        step(3, {{"0.d.down", 1000, 1000}, {"0.swiglu", 4, 10000}});
        step(4, {{"0.d.down", 1000, 1000}});
        step(5, {{"0.d.down", 1, 1000}});
        log.saturated();
        log.saturated();
    });
    std::vector<json> found;
    for (const json& event : events_of(out + "/log.jsonl"))
        if (event["event"] == "saturated") found.push_back(event);
    const auto expected = [](int64_t step, int64_t steps, const json& values, const char* worst,
                             double share) {
        return json{{"event", "saturated"}, {"step", step},   {"steps", steps},
                    {"values", values},     {"worst", worst}, {"share", share}};
    };
    check(found.size() == 3, "events of saturated values");
    check(found[0] == expected(2, 1, {{"0.swiglu", 1}}, "0.swiglu", 1e-4), "one step's");
    check(found[1] == expected(4, 2, {{"0.d.down", 2000}, {"0.swiglu", 4}}, "0.d.down", 1.0), "two steps'");
    check(found[2] == expected(5, 1, {{"0.d.down", 1}}, "0.d.down", 1e-3), "those of no line");
    check(shown.find("4/20  saturated: 100% of 0.d.down lies beyond fp8's largest value\n") != shown.npos);
    check(shown.find("saturated") == shown.rfind("saturated"), "and once");
}

TEST(check_truncate_log) {
    const std::string path = fresh_folder("truncate") + "/log.jsonl";
    truncate_log(path, 5);
    check(!fs::exists(path), "no log, nothing to truncate");
    const std::string kept =
        "{\"event\":\"start\"}\n{\"event\":\"val\",\"step\":0}\n{\"event\":\"step\",\"step\":1}\n"
        "{\"event\":\"step\",\"step\":2}\n{\"event\":\"checkpoint\",\"step\":2}\n";
    const std::string more =
        "{\"event\":\"step\",\"step\":3}\n{\"event\":\"start\"}\n{\"event\":\"step\",\"step\":4}\n";
    for (size_t cut = 0; cut <= kept.size() + more.size(); cut++) {  // wherever the run died
        overwrite(path, (kept + more).substr(0, cut));
        truncate_log(path, 2);
        std::string whole;  // lines, also one without its end
        for (const std::string& line : lines_of(kept))
            if (whole.size() + line.size() <= cut) whole += line + "\n";
        check(get(path) == whole, "log cut after " + std::to_string(cut) + " bytes: " + get(path));
    }
    for (const std::string& tail :
         {std::string(7, '\0'), std::string("[1]\n"), std::string("\n\n"), std::string("{}\0\n", 4)}) {
        overwrite(path, kept + tail);
        truncate_log(path, 2);
        check(get(path) == kept, "a torn tail is dropped");
    }
    fs::create_directory(folder + "/truncate/other");
    refused("a folder for a log", {"other: expected a file"},
            [] { truncate_log(folder + "/truncate/other", 2); });
    fs::remove(folder + "/truncate/other");
    check(truncate_log(path, 2) == std::set<std::string>{"step", "checkpoint"}, "the last step's events");
    truncate_log(path, 0);
    check(lines_of(get(path)).size() == 2, "back to the start");
    const std::string link = fresh_folder("unreadable") + "/log.jsonl";
    fs::remove(link);
    fs::create_symlink("log.jsonl", link);  // it leads nowhere
    refused("a log that cannot be read", {link}, [&] { truncate_log(link, 2); });
    check(fs::is_symlink(link), "it is as it was");
    for (const auto& entry : fs::directory_iterator(fs::path(path).parent_path()))
        check(entry.path() == path, "nothing is left beside the log");
}

}  // namespace
}  // namespace log_checks
