#include "train/checkpoint.h"

#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "core/error.h"
#include "core/file.h"
#include "train/log.h"

namespace llamac {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* manifest_format = "llamac checkpoint 1";
const char* const checkpoint_files[] = {"config.json", "model.safetensors", "optimizer.safetensors"};

std::string step_name(int64_t step) {
    char name[40];
    std::snprintf(name, sizeof name, "step_%06lld", static_cast<long long>(step));
    return name;
}

// The step of a directory called step_000100; nothing for other names.
std::optional<int64_t> step_of(const std::string& name) {
    if (name.size() < 11 || name.size() > 23 || name.rfind("step_", 0) != 0) return {};
    if (!std::all_of(name.begin() + 5, name.end(), [](char c) { return c >= '0' && c <= '9'; })) return {};
    const int64_t step = std::stoll(name.substr(5));
    if (step_name(step) != name) return {};
    return step;
}

// std::filesystem's errors as ours.
template <class F>
auto with_files(const std::string& where, F f) {
    try {
        return f();
    } catch (const fs::filesystem_error& error) {
        fail(where, ": ", error.code().message());
    }
}

fs::file_type type_of(const std::string& path) {
    return with_files(path, [&] { return fs::status(path).type(); });
}

std::vector<std::string> names_in(const std::string& directory) {
    return with_files(directory, [&] {
        std::vector<std::string> names;
        for (const auto& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename());
        std::sort(names.begin(), names.end());
        return names;
    });
}

// step -> name, oldest first.
std::map<int64_t, std::string> checkpoints_in(const std::string& out) {
    std::map<int64_t, std::string> found;
    for (const std::string& name : names_in(out))
        if (const auto step = step_of(name)) found[*step] = name;
    return found;
}

void remove_leftovers(const std::string& out) {
    const auto ends_with = [](const std::string& name, const std::string& end) {
        return name.size() > end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
    };
    for (const std::string& name : names_in(out))
        if (name.rfind(".step_", 0) == 0 && (ends_with(name, ".tmp") || ends_with(name, ".removed")))
            with_files(out + "/" + name, [&] { fs::remove_all(out + "/" + name); });
}

void prune(const std::string& out, int64_t keep) {
    auto found = checkpoints_in(out);
    for (; static_cast<int64_t>(found.size()) > keep; found.erase(found.begin())) {
        const std::string name = found.begin()->second, removed = out + "/." + name + ".removed";
        rename_durably(out + "/" + name, removed);
        with_files(removed, [&] { fs::remove_all(removed); });
    }
}

// The manifest's last line is a checksum of all bytes before it: no change to the file goes unseen.
std::string seal(const std::string& text) {
    return ",\n \"xxh3\": \"" + hex(XXH3_64bits(text.data(), text.size())) + "\"\n}\n";
}

std::string manifest_text(const Manifest& m) {
    ordered_json files = ordered_json::object();
    for (const auto& [name, record] : m.files)
        files[name] = {{"bytes", record.bytes}, {"xxh3", hex(record.xxh3)}};
    const ordered_json fields = {{"format", manifest_format},
                                 {"step", m.step},
                                 {"data_position", m.data_position},
                                 {"seed", m.seed},
                                 {"world_size", m.world_size},
                                 {"seq_len", m.seq_len},
                                 {"batch_size", m.batch_size},
                                 {"sequences", m.sequences},
                                 {"total_batch_size", m.total_batch_size},
                                 {"dtype", m.dtype},
                                 {"grad_dtype", m.grad_dtype},
                                 {"optimizer_state", m.optimizer_state},
                                 {"master_weights", m.master_weights},
                                 {"kernels", m.kernels},
                                 {"gemms", to_json(m.gemms)},
                                 {"config", m.config},
                                 {"files", files}};
    std::string text = fields.dump(1);
    text.resize(text.size() - 2);  // "\n}"
    return text + seal(text);
}

// A field of the manifest, of the type of the value it goes to.
struct Fields {
    const json& object;
    const std::string& where;

    const json& get(const char* name, json::value_t type, const char* expected) const {
        const auto found = object.find(name);
        if (found == object.end()) fail(where, ": ", name, ": expected ", expected, ", found none");
        if (found->type() != type)
            fail(where, ": ", name, ": expected ", expected, ", found ", excerpt(*found));
        return *found;
    }
    const json& object_at(const char* name) const { return get(name, json::value_t::object, "an object"); }
    std::string text(const char* name) const {
        return get(name, json::value_t::string, "a string").get<std::string>();
    }
    int64_t integer(const char* name, int64_t low) const {
        const json& value = get(name, json::value_t::number_unsigned, "an integer of at least 0");
        const uint64_t number = value.get<uint64_t>();
        if (number < static_cast<uint64_t>(low) || number > INT64_MAX)
            fail(where, ": ", name, ": expected an integer from ", low, " to 2^63-1, found ", number);
        return static_cast<int64_t>(number);
    }
    std::string one_of(const char* name, const char* a, const char* b) const {
        const std::string value = text(name);
        if (value != a && value != b)
            fail(where, ": ", name, ": expected ", a, " or ", b, ", found ", quote(value));
        return value;
    }
    template <size_t N>
    void only(const char* const (&known)[N]) const {
        for (const auto& item : object.items())
            if (std::count(known, known + N, item.key()) == 0)
                fail(where, ": unknown field ", quote(item.key()));
    }
};

FileRecord parse_record(const json& object, const std::string& where) {
    if (!object.is_object()) fail(where, ": expected an object, found ", excerpt(object));
    const Fields fields{object, where};
    fields.only({"bytes", "xxh3"});
    const std::string hash = fields.text("xxh3");
    const bool is_hash = hash.size() == 16 && hash.find_first_not_of("0123456789abcdef") == hash.npos;
    if (!is_hash) fail(where, ": xxh3: expected 16 hexadecimal digits, found ", quote(hash));
    return {fields.integer("bytes", 0), std::stoull(hash, nullptr, 16)};
}

Manifest parse_manifest(const std::string& text, const std::string& where) {
    const json object = parse_json(text, where);
    if (!object.is_object()) fail(where, ": expected a JSON object, found ", excerpt(object));
    const Fields fields{object, where};
    if (const std::string format = fields.text("format"); format != manifest_format)
        fail(where, ": format: expected ", quote(manifest_format), ", found ", quote(format));
    const size_t end = text.rfind(",\n");
    if (end == text.npos || text.substr(end) != seal(text.substr(0, end)))
        fail(where, ": its checksum is not that of its text: it was changed or cut short");
    fields.only({"format", "step", "data_position", "seed", "world_size", "seq_len", "batch_size",
                 "sequences", "total_batch_size", "dtype", "grad_dtype", "optimizer_state", "master_weights",
                 "kernels", "gemms", "config", "files", "xxh3"});
    Manifest m;
    m.step = fields.integer("step", 0);
    m.data_position = fields.integer("data_position", 0);
    m.seed = fields.integer("seed", 0);
    m.world_size = fields.integer("world_size", 1);
    m.seq_len = fields.integer("seq_len", 1);
    m.batch_size = fields.integer("batch_size", 1);
    m.sequences = fields.integer("sequences", 0);
    m.total_batch_size = fields.integer("total_batch_size", 1);
    m.dtype = fields.one_of("dtype", "f32", "bf16");
    m.grad_dtype = fields.one_of("grad_dtype", "f32", "bf16");
    m.optimizer_state = fields.one_of("optimizer_state", "f32", "bf16");
    m.master_weights = fields.one_of("master_weights", "on", "off");
    for (const auto& item : fields.object_at("kernels").items()) {
        if (!item.value().is_string())
            fail(where, ": kernels: ", quote(item.key()), ": expected a string, found ",
                 excerpt(item.value()));
        m.kernels[item.key()] = item.value().get<std::string>();
    }
    m.gemms = parse_gemm_choices(fields.object_at("gemms"), where + ": gemms");
    m.config = fields.object_at("config");
    const json& files = fields.object_at("files");
    Fields{files, where + ": files"}.only(checkpoint_files);
    for (const char* name : checkpoint_files) {
        const std::string at = where + ": files: " + name;
        if (!files.contains(name)) fail(at, ": expected an object, found none");
        m.files[name] = parse_record(files[name], at);
    }
    return m;
}

// Moves what an earlier run left into the first previous_N that does not exist yet; returns its path.
std::string set_aside(const std::string& out, const std::vector<std::string>& names) {
    std::string previous;
    for (int n = 1; previous.empty() || type_of(previous) != fs::file_type::not_found; n++)
        previous = out + "/previous_" + std::to_string(n);
    with_files(previous, [&] { fs::create_directory(previous); });
    for (const std::string& name : names) rename_durably(out + "/" + name, previous + "/" + name);
    return previous;
}

}  // namespace

Manifest describe_run(const Options& options, int64_t world_size, int64_t step) {
    Manifest m;
    m.step = step;
    m.seed = options.seed;
    m.world_size = world_size;
    m.seq_len = options.seq_len;
    m.batch_size = options.batch_size;
    m.total_batch_size = micro_steps(options, world_size) * options.batch_size * options.seq_len * world_size;
    m.data_position = step * (m.total_batch_size / m.seq_len);
    m.dtype = options.dtype;
    m.grad_dtype = options.grad_dtype;
    m.optimizer_state = options.optimizer_state;
    m.master_weights = options.master_weights;
    m.config = to_json(options);
    return m;
}

void write_checkpoint_to(const std::string& directory, Manifest manifest, const std::string& config_json,
                         const std::vector<NamedTensor>& weights, const std::vector<NamedTensor>& optimizer,
                         const std::vector<CarriedFile>& carried) {
    if (type_of(directory) != fs::file_type::not_found)
        fail(directory, ": expected no file or directory of this name yet, found one");
    const fs::path path(directory);
    const std::string temporary = path.parent_path() / ("." + path.filename().string() + ".tmp");
    try {
        with_files(temporary, [&] { fs::remove_all(temporary), fs::create_directory(temporary); });
        const auto record = [&](const char* file, uint64_t xxh3) {
            const auto bytes = with_files(temporary, [&] { return fs::file_size(temporary + "/" + file); });
            manifest.files[file] = {static_cast<int64_t>(bytes), xxh3};
        };
        record("config.json", write_file(temporary + "/config.json", config_json));
        record("model.safetensors",
               write_safetensors(temporary + "/model.safetensors", weights, {{"format", "pt"}}));
        record("optimizer.safetensors", write_safetensors(temporary + "/optimizer.safetensors", optimizer));
        write_carried_files(temporary, carried);
        write_file(temporary + "/manifest.json", manifest_text(manifest));
        rename_durably(temporary, directory);
    } catch (const Error&) {  // a full disk, for one: what was written would only keep it full
        std::error_code ignored;
        fs::remove_all(temporary, ignored);
        throw;
    }
}

std::string write_checkpoint(const std::string& out, int64_t keep, Manifest manifest,
                             const std::string& config_json, const std::vector<NamedTensor>& weights,
                             const std::vector<NamedTensor>& optimizer,
                             const std::vector<CarriedFile>& carried) {
    CHECK(keep >= 1);
    remove_leftovers(out);
    const std::string directory = out + "/" + step_name(manifest.step);
    write_checkpoint_to(directory, std::move(manifest), config_json, weights, optimizer, carried);
    prune(out, keep);
    return directory;
}

std::string checkpoint_to_resume(const std::string& out, const std::string& resume) {
    if (resume == "none") return "";
    if (resume != "auto") return resume;
    if (type_of(out) == fs::file_type::not_found) return "";
    const auto found = checkpoints_in(out);
    return found.empty() ? "" : out + "/" + found.rbegin()->second;
}

Manifest open_checkpoint(const std::string& directory) {
    const std::string where = directory + "/manifest.json";
    if (const fs::file_type type = type_of(directory); type != fs::file_type::directory)
        fail(directory, ": expected a checkpoint's directory, found ",
             type == fs::file_type::not_found ? "nothing" : "something else");
    if (type_of(where) == fs::file_type::not_found)
        fail(directory, ": expected a checkpoint, found a directory without manifest.json");
    const Manifest manifest = parse_manifest(std::string(MappedFile(where).text()), where);
    for (const auto& [name, record] : manifest.files) {
        const std::string path = directory + "/" + name;
        const int64_t bytes = MappedFile(path).size;
        if (bytes != record.bytes) fail(path, ": expected ", record.bytes, " bytes, found ", bytes);
        const uint64_t xxh3 = hash_file(path);
        if (xxh3 != record.xxh3)
            fail(path, ": expected the XXH3 checksum ", hex(record.xxh3), ", found ", hex(xxh3));
    }
    return manifest;
}

void check_resume(const Manifest& m, const std::string& directory, const Options& options,
                  int64_t world_size) {
    const Manifest asked = describe_run(options, world_size, m.step);
    const auto same = [&](const char* flag, const auto& made, const auto& now) {
        if (made != now)
            fail(directory, ": was written with --", flag, " ", made, ", expected the same, found ", now);
    };
    same("seed", m.seed, asked.seed);
    same("seq-len", m.seq_len, asked.seq_len);
    same("total-batch-size", m.total_batch_size, asked.total_batch_size);
    same("dtype", m.dtype, asked.dtype);
    same("optimizer-state", m.optimizer_state, asked.optimizer_state);
    same("master-weights", m.master_weights, asked.master_weights);
    if (m.step > options.steps)
        fail(directory, ": expected at most --steps ", options.steps, ", found a checkpoint of step ",
             m.step);
}

std::string changed_flags(const Manifest& m, const Options& options, int64_t sequences) {
    const json now = to_json(options);
    std::string text;
    const auto add = [&](const std::string& what, const json& was, const json& is) {
        if (was != is) text += (text.empty() ? "" : ", ") + what + " was " + was.dump() + ", is " + is.dump();
    };
    for (const char* flag :
         {"steps", "lr", "min-lr-frac", "warmup-steps", "schedule", "weight-decay", "beta1", "beta2",
          "grad-clip", "batch-size", "grad-dtype", "train-data", "kernel"})
        if (m.config.contains(flag)) add(std::string("--") + flag, m.config[flag], now[flag]);
    if (m.sequences && sequences)
        add("sequences of training data, whose order hangs on their number:", m.sequences, sequences);
    return text;
}

std::string prepare_output(const std::string& out, const std::string& checkpoint, int64_t step) {
    with_files(out, [&] { fs::create_directories(out); });
    remove_leftovers(out);
    const bool goes_on = !checkpoint.empty() && with_files(checkpoint, [&] {
        return fs::equivalent(fs::canonical(checkpoint).parent_path(), out);
    });
    std::vector<std::string> aside;
    for (const std::string& name : names_in(out)) {
        const auto its_step = step_of(name);
        const bool its_own =
            name == "log.jsonl" || name == "loss.png" || name == "profile.json" || name == "trace.json";
        if (goes_on ? its_step && *its_step > step : its_step || its_own) aside.push_back(name);
    }
    const std::string previous = aside.empty() ? "" : set_aside(out, aside);
    if (goes_on) truncate_log(out + "/log.jsonl", step);
    if (previous.empty()) return "";
    return (goes_on ? "newer checkpoints are now in " : "an earlier run's log and checkpoints are now in ") +
           previous;
}

}  // namespace llamac
