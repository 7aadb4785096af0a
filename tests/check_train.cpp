// The log and the checkpoints: what is written reads back, what is malformed, cut short or interrupted is
// refused in one line that names it, and no earlier checkpoint is lost.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "check.h"
#include "train/checkpoint.h"
#include "train/log.h"

using namespace llamac;
namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

namespace {

// As put(), at a path.
void overwrite(const std::string& path, const std::string& bytes) {
    put(fs::relative(path, folder), bytes);
}

std::string fresh_folder(const std::string& name) {
    const std::string path = in_folder(name);
    fs::create_directories(path);
    return path;
}

// Runs f in a child process; returns its exit status: 0, or 2 for an Error; -1 if a signal ended it.
int in_child(const std::function<void()>& f) {
    std::cout.flush();
    const pid_t child = fork();
    if (child == 0) _exit(error_of(f).empty() ? 0 : 2);
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

Options with_flags(std::vector<const char*> flags) {
    flags.insert(flags.begin(), "train_llama3");
    return parse_options(static_cast<int>(flags.size()), flags.data());
}

// ---- log ----

std::vector<json> events_of(const std::string& path) {
    std::vector<json> events;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) events.push_back(json::parse(line));
    return events;
}

void check_log() {
    const std::string out = fresh_folder("log");
    char* text = nullptr;
    size_t size = 0;
    std::FILE* console = open_memstream(&text, &size);
    {
        Log log(out, {20, 2048, 1e9, 1e13, true}, console);
        for (const auto& [heading, rows] : configuration_rows(Options())) log.table(heading, rows);
        log.memory({{"weights", 38, 10 << 20}, {"activations", 7, 1 << 19}});
        log.start(to_json(Options()));
        log.val(0, 8.3);
        log.step({1, 8.0, 1.5, 1e-3, 1000.0, {2.5, 90, 0.25, 4.5, 150}});
        const double nan = std::numeric_limits<double>::quiet_NaN();
        log.step({2, nan, 1.5, 1e-3, 500.0, {3, nan, 0.375, 4, 75}});
        log.sample(2, "def f():\n\t\"\xff\x1b[2J");
        log.checkpoint(2, out + "/step_000002");
        log.print_usage();
    }
    std::fclose(console);
    const std::string shown(text, size);
    std::free(text);

    const auto events = events_of(out + "/log.jsonl");
    check(events.size() == 6, "one line an event");
    check(events[0]["event"] == "start" && events[0]["batch-size"] == 8 &&
              events[0].size() == to_json(Options()).size() + 1,
          "start event");
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
              std::abs(step["mfu"].get<double>() - 0.2048) < 1e-12,
          "step's speed");
    check(step["gpu_percent"] == 90.0 && step["rss_gib"] == 0.25 && step["system_mem_gib"] == 4.5 &&
              step["cpu_percent"] == 150.0,
          "what a step takes of the machine");
    check(events[3]["loss"].is_null() && events[3]["gpu_percent"].is_null(), "NaN is null");
    check(events[4] == json{{"event", "sample"}, {"step", 2}, {"text", "def f():\n\t\"\ufffd\x1b[2J"}},
          "sample event");
    check(events[5] == json{{"event", "checkpoint"}, {"step", 2}, {"path", out + "/step_000002"}},
          "checkpoint event");

    check(shown.find('\x1b') == shown.npos, "no escape sequence reaches the terminal");
    for (const char* part :
         {"1/20", "8.0000", "2.0", "20.5", "19 s", "mem GiB", "   2.50       19 s", "validation",
          "step_000002", "tokens/s", "TFLOP/s", "% of peak", "weight-decay", "10.5", "45",
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
    check(duration(0.4) == "0 s" && duration(59.6) == "1:00" && duration(185) == "3:05", "short durations");
    check(duration(25325) == "7:02:05" && duration(NAN) == "-" && duration(INFINITY) == "-",
          "long durations");
    check(grouped(1) == "1" && grouped(999) == "999" && grouped(1000) == "1,000", "grouped");
    check(grouped(1234567) == "1,234,567" && grouped(-123456) == "-123,456" && grouped(123456) == "123,456",
          "grouped");
}

void check_truncate_log() {
    const std::string path = fresh_folder("truncate") + "/log.jsonl";
    truncate_log(path, 5);
    check(!fs::exists(path), "no log, nothing to truncate");
    const std::string kept =
        "{\"event\":\"start\"}\n{\"event\":\"val\",\"step\":0}\n{\"event\":\"step\",\"step\":1}\n"
        "{\"event\":\"step\",\"step\":2}\n{\"event\":\"checkpoint\",\"step\":2}\n";
    const std::string more =
        "{\"event\":\"step\",\"step\":3}\n{\"event\":\"start\"}\n{\"event\":\"step\",\"step\":4}\n";
    for (size_t cut = 0; cut <= more.size(); cut++) {  // wherever the run died
        overwrite(path, kept + more.substr(0, cut));
        truncate_log(path, 2);
        if (get(path) != kept) check(false, "log cut after " + std::to_string(cut) + " bytes: " + get(path));
    }
    passed++;
    for (const std::string& tail : {std::string(7, '\0'), std::string("[1]\n"), std::string("\n\n")}) {
        overwrite(path, kept + tail);
        truncate_log(path, 2);
        check(get(path) == kept, "a torn tail is dropped");
    }
    truncate_log(path, 0);
    check(events_of(path).size() == 2, "back to the start");
    for (const auto& entry : fs::directory_iterator(fs::path(path).parent_path()))
        check(entry.path() == path, "nothing is left beside the log");
}

// ---- checkpoints ----

float weight_data[6] = {1, 2, 3, 4, 5, 6}, moment_data[2][6];

std::string save(const std::string& out, int64_t step, int64_t keep = 100) {
    weight_data[0] = static_cast<float>(step);
    Manifest m = describe_run(Options(), 1, step);
    m.kernels = {{"rmsnorm_forward", "2"}};
    m.sequences = 123;
    m.gemms = {"Some Device", "someBLASLt 1", {{"nt 8x6x4 f32 f32", {"00ff", 0.375, 32}}}};
    const Tensor w = make_tensor(weight_data, DType::f32, {2, 3});
    return write_checkpoint(out, keep, m, "{\"model_type\": \"llama\"}\n", {{"w", w}},
                            {{"m.w", make_tensor(moment_data[0], DType::f32, {2, 3})},
                             {"v.w", make_tensor(moment_data[1], DType::f32, {2, 3})}});
}

std::vector<std::string> names_in(const std::string& out) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(out)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
}

void check_checkpoint() {
    const std::string out = fresh_folder("checkpoint");
    check(checkpoint_to_resume(out, "auto").empty(), "auto with no checkpoint starts anew");
    check(checkpoint_to_resume(folder + "/none", "auto").empty(), "auto with no directory starts anew");
    const std::string path = save(out, 7);
    check(path == out + "/step_000007" && names_in(out) == std::vector<std::string>{"step_000007"},
          "written");
    check(names_in(path) == std::vector<std::string>{"config.json", "manifest.json", "model.safetensors",
                                                     "optimizer.safetensors"},
          "a checkpoint's files");
    const Manifest m = open_checkpoint(path);
    check(m.step == 7 && m.data_position == 56 && m.seed == 42 && m.world_size == 1, "manifest's numbers");
    check(m.seq_len == 256 && m.batch_size == 8 && m.sequences == 123 && m.total_batch_size == 2048,
          "manifest's sizes");
    check(m.dtype == "f32" && m.grad_dtype == "f32" && m.optimizer_state == "f32" && m.master_weights == "on",
          "types");
    check(m.kernels.size() == 1 && m.kernels.at("rmsnorm_forward") == "2", "manifest's kernels");
    check(to_json(m.gemms).dump() ==
              R"({"device":"Some Device","library":"someBLASLt 1","choices":{"nt 8x6x4 f32 f32":)"
              R"({"ms":0.375,"tried":32,"algorithm":"00ff"}}})",
          "manifest's matrix products");
    check(m.config == json(to_json(Options())), "manifest's configuration");
    check(m.files.at("config.json").bytes == 24 && m.files.size() == 3, "manifest's files");
    const SafetensorsFile model(path + "/model.safetensors"), optimizer(path + "/optimizer.safetensors");
    check(static_cast<const float*>(model.find("w")->data)[0] == 7 && model.metadata.at("format") == "pt",
          "weights");
    check(optimizer.find("m.w") && optimizer.find("v.w"), "optimizer's tensors");

    save(out, 10);
    save(out, 1000000);
    check(checkpoint_to_resume(out, "auto") == out + "/step_1000000", "the newest by its number");
    check(checkpoint_to_resume(out, "none").empty() && checkpoint_to_resume(out, "x/y") == "x/y",
          "none, and a directory");
    refused("the same step twice", {"step_000010", "found one"}, [&] { save(out, 10); });
    check(open_checkpoint(out + "/step_000010").step == 10, "it is as it was");

    const std::vector<std::string> others = {"step_0000002", "step_000x", "step_12", "steps"};
    for (const std::string& name : others) fs::create_directories(out + "/" + name);
    fs::create_directories(out + "/.step_000009.tmp/deeper");
    fs::create_directories(out + "/.step_000001.removed");
    overwrite(out + "/.step_000009.tmp/deeper/model.safetensors", "half");
    save(out, 1000001, 2);
    std::vector<std::string> expected = others;
    expected.insert(expected.begin() + 2, {"step_1000000", "step_1000001"});
    check(names_in(out) == expected,
          "leftovers are gone, the oldest checkpoints are pruned, other names are left alone");
}

void check_resume_rules() {
    const Manifest m = describe_run(Options(), 1, 100);
    check(error_of([&] {
              check_resume(m, "d",
                           with_flags({"--lr", "1", "--batch-size", "4", "--total-batch-size", "2048"}));
          }).empty(),
          "what may differ");
    check(error_of([&] { check_resume(m, "d", with_flags({"--batch-size", "4"}), 2); }).empty(),
          "more devices, smaller batch");
    check(changed_flags(m, Options(), 5).empty(),
          "nothing differs where the number of sequences is not known");
    Manifest counted = m;
    counted.sequences = 7;
    const std::string changed =
        changed_flags(counted, with_flags({"--lr", "1", "--out", "x", "--sample-every", "1"}), 5);
    check(changed ==
              "--lr was 0.003, is 1.0, sequences of training data, whose order hangs on their number: was 7, "
              "is 5",
          changed);
    const std::vector<std::vector<const char*>> differ = {
        {"--seed", "43"},    {"--seq-len", "128"},          {"--batch-size", "4"},
        {"--dtype", "bf16"}, {"--optimizer-state", "bf16"}, {"--master-weights", "off"},
        {"--steps", "99"}};
    for (const auto& flags : differ)
        refused(std::string("resume with ") + flags[0], {"d: "},
                [&, &given = flags] { check_resume(m, "d", with_flags(given)); });
}

// As write_checkpoint closes a manifest: a checksum of all bytes before it.
std::string sealed(const ordered_json& fields) {
    std::string text = fields.dump(1);
    text.resize(text.size() - 2);
    char hash[17];
    std::snprintf(hash, sizeof hash, "%016llx",
                  static_cast<unsigned long long>(XXH3_64bits(text.data(), text.size())));
    return text + ",\n \"xxh3\": \"" + hash + "\"\n}\n";
}

void check_bad_manifests() {
    const std::string path = save(fresh_folder("manifest"), 3), file = path + "/manifest.json",
                      good = get(file);
    ordered_json fields = ordered_json::parse(good);
    fields.erase("xxh3");
    check(sealed(fields) == good, "a manifest's checksum");
    const auto damaged = [&](const std::string& what, const std::string& text, const std::string& word) {
        overwrite(file, text);
        refused(what, {file, word}, [&] { open_checkpoint(path); });
    };
    for (size_t i = 0; i < good.size(); i++) {
        std::string text = good;
        for (const char bits : {'\x01', '\x20', '\x80'}) {
            text[i] = static_cast<char>(good[i] ^ bits);
            damaged("manifest with byte " + std::to_string(i) + " changed", text, ": ");
        }
        damaged("manifest cut to " + std::to_string(i) + " bytes", good.substr(0, i), ": ");
    }
    for (const char* tail : {" ", "\n", "{}", "\xff"}) damaged("manifest with a tail", good + tail, ": ");

    const auto with = [&](const json::json_pointer& at, const ordered_json& value) {
        ordered_json changed = fields;
        changed[nlohmann::ordered_json::json_pointer(at.to_string())] = value;
        return sealed(changed);
    };
    for (const auto& item : fields.items()) {
        ordered_json without = fields;
        without.erase(item.key());
        damaged("manifest without " + item.key(), sealed(without), item.key());
        for (const ordered_json& wrong : {ordered_json(nullptr), ordered_json(-1), ordered_json(1.5),
                                          ordered_json("?"), ordered_json::array(), ordered_json(true)})
            damaged("manifest with " + item.key() + " " + wrong.dump(),
                    with(json::json_pointer("/" + item.key()), wrong), item.key());
    }
    damaged("unknown field", with(json::json_pointer("/colour"), 1), "colour");
    damaged("huge step", with(json::json_pointer("/step"), UINT64_MAX), "step");
    damaged("no world", with(json::json_pointer("/world_size"), 0), "world_size");
    damaged("a later format", with(json::json_pointer("/format"), "llamac checkpoint 2"),
            "llamac checkpoint 1");
    damaged("unknown file", with(json::json_pointer("/files/..~1x"), fields["files"]["config.json"]), "../x");
    damaged("unknown field of a file", with(json::json_pointer("/files/config.json/x"), 1), "config.json");
    damaged("negative size", with(json::json_pointer("/files/config.json/bytes"), -1), "bytes");
    damaged("short hash", with(json::json_pointer("/files/config.json/xxh3"), "12"), "xxh3");
    damaged("hash of other digits", with(json::json_pointer("/files/config.json/xxh3"), "0123456789ABCDEF"),
            "xxh3");
    damaged("kernel of another type", with(json::json_pointer("/kernels/x"), 2), "kernels: \"x\"");
    for (const char* field : {"device", "library", "choices"}) {
        ordered_json without = fields;
        without["gemms"].erase(field);
        damaged(std::string("matrix products without ") + field, sealed(without),
                "gemms: expected device, library");
    }
    damaged("a matrix product of another type", with(json::json_pointer("/gemms/choices/x"), 2),
            "gemms: expected");
    ordered_json no_file = fields;
    no_file["files"].erase("model.safetensors");
    damaged("a file left out", sealed(no_file), "model.safetensors");
    damaged("deep manifest", std::string(100000, '['), ": ");
    damaged("empty manifest", "", ": ");
    damaged("a list", "[]", "object");
    overwrite(file, good);
    check(open_checkpoint(path).step == 3, "the undamaged manifest");
}

void check_bad_files() {
    const std::string out = fresh_folder("files"), path = save(out, 3);
    for (const char* name : {"config.json", "model.safetensors", "optimizer.safetensors"}) {
        const std::string file = path + "/" + name, good = get(file);
        const auto damaged = [&](const std::string& what, const std::string& bytes) {
            overwrite(file, bytes);
            const char* reason = bytes.size() == good.size() ? "checksum" : "bytes";
            refused(what, {file, reason}, [&] { open_checkpoint(path); });
        };
        for (size_t i = 0; i < good.size(); i++) {
            std::string bytes = good;
            bytes[i] = static_cast<char>(bytes[i] ^ 1 << i % 8);
            damaged(std::string(name) + " with byte " + std::to_string(i) + " changed", bytes);
            damaged(std::string(name) + " cut to " + std::to_string(i) + " bytes", good.substr(0, i));
        }
        damaged(std::string(name) + " with a tail", good + " ");
        fs::remove(file);
        refused(std::string("no ") + name, {file, "No such file"}, [&] { open_checkpoint(path); });
        fs::create_directory(file);
        refused(std::string(name) + " is a folder", {file}, [&] { open_checkpoint(path); });
        fs::remove(file);
        overwrite(file, good);
    }
    check(open_checkpoint(path).step == 3, "the undamaged checkpoint");

    refused("no such directory", {out + "/none", "checkpoint"}, [&] { open_checkpoint(out + "/none"); });
    refused("a file", {path + "/config.json", "checkpoint"}, [&] { open_checkpoint(path + "/config.json"); });
    refused("not a checkpoint", {out, "without manifest.json"}, [&] { open_checkpoint(out); });
    const std::string newest = save(out, 9);
    overwrite(newest + "/model.safetensors", "half");
    check(checkpoint_to_resume(out, "auto") == newest, "auto does not pass over a damaged checkpoint");
    refused("damaged newest", {newest}, [&] { open_checkpoint(checkpoint_to_resume(out, "auto")); });
}

// A disk that is full at any point of the write: the earlier checkpoint stays, the new one leaves nothing.
void check_full_disk() {
    signal(SIGXFSZ, SIG_IGN);
    const std::string out = fresh_folder("full_disk"), earlier = save(out, 1);
    size_t largest = 0;
    for (const auto& entry : fs::directory_iterator(earlier))
        largest = std::max<size_t>(largest, entry.file_size());
    for (const size_t limit : {size_t{0}, size_t{10}, largest / 2, largest - 1}) {
        const int status = in_child([&] {
            const rlimit bytes = {limit, limit};
            setrlimit(RLIMIT_FSIZE, &bytes);
            const std::string message = error_of([&] { save(out, 2, 1); });
            if (message.find("File too large") != message.npos) fail(message);
        });
        const std::string what = "files of at most " + std::to_string(limit) + " bytes: ";
        check(status == 2, what + "the write fails");
        check(names_in(out) == std::vector<std::string>{"step_000001"}, what + "nothing is left behind");
        check(open_checkpoint(earlier).step == 1, what + "the earlier checkpoint is intact");
    }
    save(out, 2, 1);
    check(names_in(out) == std::vector<std::string>{"step_000002"}, "with room again");
}

// A process that is killed while it writes and prunes: what is called a checkpoint is one, and the next run
// goes on.
void check_killed() {
    const std::string out = fresh_folder("killed");
    save(out, 1);
    int cut_short = 0;
    for (int round = 0; round < 24; round++) {
        const int64_t step = open_checkpoint(checkpoint_to_resume(out, "auto")).step;
        const pid_t child = fork();
        if (child == 0) {
            for (int64_t s = step + 1;; s++) save(out, s, 2);
        }
        usleep(static_cast<useconds_t>(1500 * (round % 10) + 137 * round));
        kill(child, SIGKILL);
        waitpid(child, nullptr, 0);
        size_t checkpoints = 0;
        for (const std::string& name : names_in(out)) {
            cut_short += name[0] == '.';
            if (name[0] == '.') continue;
            checkpoints++;
            const std::string message = error_of([&] { open_checkpoint(out + "/" + name); });
            check(message.empty(), "after a kill: " + message);
        }
        check(checkpoints >= 1, "after a kill: a checkpoint is left");
    }
    check(cut_short > 0, "some kill struck within a write");
    save(out, 1000000, 1);
    check(names_in(out) == std::vector<std::string>{"step_1000000"}, "the next write clears up");
}

void check_prepare_output() {
    const std::string out = folder + "/prepare/deep";
    check(prepare_output(out, "", 0).empty() && fs::is_directory(out), "an empty directory");
    check(prepare_output(out, "", 0).empty() && names_in(out).empty(), "again");
    const std::string log =
        "{\"event\":\"step\",\"step\":1}\n{\"event\":\"step\",\"step\":2}\n{\"event\":\"step\",\"step\":3}\n";
    save(out, 1);
    save(out, 2);
    save(out, 3);
    overwrite(out + "/log.jsonl", log);
    for (const char* name : {"loss.png", "profile.json", "trace.json"}) overwrite(out + "/" + name, "old");
    overwrite(out + "/notes.txt", "mine");
    check(prepare_output(out, out + "/step_000003/", 3).empty(), "going on from the newest");
    check(get(out + "/log.jsonl") == log && names_in(out).size() == 8, "nothing is moved");
    const std::string branch = prepare_output(out, out + "/step_000002", 2);
    check(branch.find(out + "/previous_1") != branch.npos, "going on from an older one: " + branch);
    check(names_in(out + "/previous_1") == std::vector<std::string>{"step_000003"},
          "newer checkpoints are set aside");
    check(events_of(out + "/log.jsonl").size() == 2, "the log is cut back");
    const std::string moved = prepare_output(out, "", 0);
    check(moved.find(out + "/previous_2") != moved.npos, "anew: " + moved);
    check(names_in(out) == std::vector<std::string>{"notes.txt", "previous_1", "previous_2"},
          "the run is set aside");
    check(
        names_in(out + "/previous_2") == std::vector<std::string>{"log.jsonl", "loss.png", "profile.json",
                                                                  "step_000001", "step_000002", "trace.json"},
        "all of it");
    check(open_checkpoint(out + "/previous_2/step_000002").step == 2, "and it can be resumed");
    save(out, 5);
    prepare_output(out, out + "/previous_2/step_000002", 2);
    check(names_in(out) == std::vector<std::string>{"notes.txt", "previous_1", "previous_2", "previous_3"},
          "a checkpoint from elsewhere starts a new log");
    refused("out is a file", {out + "/notes.txt"}, [&] { prepare_output(out + "/notes.txt", "", 0); });
}

}  // namespace

int main() {
    return run_checks({check_log, check_truncate_log, check_checkpoint, check_resume_rules,
                       check_bad_manifests, check_bad_files, check_full_disk, check_killed,
                       check_prepare_output});
}
