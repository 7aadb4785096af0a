#include "checkpoint/manifest.h"

#include <xxhash.h>

#include <algorithm>
#include <limits>
#include <set>

#include "core/file.h"
#include "core/folder.h"
#include "core/json.h"
#include "platform/error.h"

namespace llamac {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char *format_1 = "llamac checkpoint 1", *format_2 = "llamac checkpoint 2";

// The files of format 1; every format has at least one file of each role.
constexpr struct {
    const char *name, *role;
} first_files[] = {
    {"config.json", "config"}, {"model.safetensors", "weights"}, {"optimizer.safetensors", "optimizer"}};

// The fields of a manifest that describe the run. low: the least value.
constexpr struct {
    const char* name;
    int64_t Manifest::* member;
    int64_t low;
} integers[] = {{"step", &Manifest::step, 0},           {"data_position", &Manifest::data_position, 0},
                {"seed", &Manifest::seed, 0},           {"world_size", &Manifest::world_size, 1},
                {"seq_len", &Manifest::seq_len, 1},     {"batch_size", &Manifest::batch_size, 1},
                {"sequences", &Manifest::sequences, 0}, {"total_batch_size", &Manifest::total_batch_size, 1}};
constexpr struct {
    const char* name;
    std::string Manifest::* member;
    std::initializer_list<const char*> values;
} choices[] = {{"dtype", &Manifest::dtype, {"f32", "bf16", "fp16"}},
               {"grad_dtype", &Manifest::grad_dtype, {"f32", "bf16"}},
               {"optimizer_state", &Manifest::optimizer_state, {"f32", "bf16"}},
               {"master_weights", &Manifest::master_weights, {"on", "off"}}};

// The manifest's last line is a checksum of all bytes before it: no change to the file goes unseen.
std::string seal(const std::string& text) {
    return ",\n \"xxh3\": \"" + hex(XXH3_64bits(text.data(), text.size())) + "\"\n}\n";
}

// A field of the manifest, of the type of the value it goes to.
struct ManifestFields {
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
    std::string one_of(const char* name, std::initializer_list<const char*> values) const {
        const std::string value = text(name);
        std::string expected;
        for (const char* each : values) {
            if (value == each) return value;
            expected += (expected.empty() ? "" : " or ") + std::string(each);
        }
        fail(where, ": ", name, ": expected ", expected, ", found ", quote(value));
    }
    void only(const std::set<std::string>& known) const {
        for (const auto& item : object.items())
            if (!known.count(item.key())) fail(where, ": unknown field ", quote(item.key()));
    }
};

// Bytes and hash, which both formats have.
FileRecord parse_record(const ManifestFields& fields) {
    const std::string hash = fields.text("xxh3");
    const bool is_hash = hash.size() == 16 && hash.find_first_not_of("0123456789abcdef") == hash.npos;
    if (!is_hash) fail(fields.where, ": xxh3: expected 16 hexadecimal digits, found ", quote(hash));
    FileRecord record;
    record.bytes = fields.integer("bytes", 0);
    record.xxh3 = std::stoull(hash, nullptr, 16);
    return record;
}

// Format 1: {"config.json": {"bytes": 1, "xxh3": "..."}, ...}, these three names.
std::vector<FileRecord> parse_files_1(const json& files, const std::string& where) {
    if (!files.is_object()) fail(where, ": expected an object, found ", excerpt(files));
    std::vector<FileRecord> records;
    for (const auto& [name, role] : first_files) {
        const std::string at = where + ": " + name;
        const auto found = files.find(name);
        if (found == files.end()) fail(at, ": expected an object, found none");
        if (!found->is_object()) fail(at, ": expected an object, found ", excerpt(*found));
        const ManifestFields fields{*found, at};
        fields.only({"bytes", "xxh3"});
        FileRecord record = parse_record(fields);
        record.name = name, record.role = role;
        records.push_back(record);
    }
    std::set<std::string> known;
    for (const auto& [name, role] : first_files) known.insert(name);
    ManifestFields{files, where}.only(known);
    return records;
}

// The name of a file in the checkpoint's own directory.
void check_name(const std::string& name, const std::vector<FileRecord>& before, const std::string& where) {
    const bool plain = !name.empty() && name[0] != '.' && is_file_name(name) &&
                       name.find('\\') == name.npos && name != "manifest.json";
    if (!plain) fail(where, ": name: expected a file in the checkpoint, found ", quote(name));
    if (std::any_of(before.begin(), before.end(), [&](const FileRecord& r) { return r.name == name; }))
        fail(where, ": name: found ", quote(name), " twice");
}

// Format 2: {"name": "config.json", "bytes": 1, "xxh3": "...", "role": "config", "rank": null}.
FileRecord parse_record_2(const json& file, int64_t world_size, const std::string& at) {
    if (!file.is_object()) fail(at, ": expected an object, found ", excerpt(file));
    const ManifestFields fields{file, at};
    fields.only({"name", "bytes", "xxh3", "role", "rank"});
    FileRecord record = parse_record(fields);
    record.name = fields.text("name");
    record.role = fields.text("role");
    if (!file.contains("rank")) fail(at, ": rank: expected null or an integer, found none");
    if (file["rank"].is_null()) return record;
    record.rank = fields.integer("rank", 0);
    if (*record.rank >= world_size)
        fail(at, ": rank: expected less than world_size ", world_size, ", found ", *record.rank);
    return record;
}

std::vector<FileRecord> parse_files_2(const json& files, int64_t world_size, const std::string& where) {
    if (!files.is_array()) fail(where, ": expected a list, found ", excerpt(files));
    std::vector<FileRecord> records;
    for (const json& file : files) {
        const std::string at = where + ": " + std::to_string(records.size());
        const FileRecord record = parse_record_2(file, world_size, at);
        check_name(record.name, records, at);
        records.push_back(record);
    }
    for (const auto& [name, role] : first_files)
        if (std::none_of(records.begin(), records.end(), [&](const FileRecord& r) { return r.role == role; }))
            fail(where, ": expected a file of the role ", role, " (", name, "), found none");
    return records;
}

ordered_json to_json(const std::vector<FileRecord>& records) {
    ordered_json files = ordered_json::array();
    for (const FileRecord& file : records)
        files.push_back({{"name", file.name},
                         {"bytes", file.bytes},
                         {"xxh3", hex(file.xxh3)},
                         {"role", file.role},
                         {"rank", file.rank ? ordered_json(*file.rank) : ordered_json()}});
    return files;
}

}  // namespace

Manifest describe_run(const Options& options, int64_t world_size, int64_t step) {
    Manifest m;
    m.step = step;
    m.seed = options.seed;
    m.world_size = world_size;
    m.seq_len = options.seq_len;
    m.batch_size = options.batch_size;
    const int64_t data_ranks = mesh_of(options, 0, world_size).data.ranks;
    m.total_batch_size =
        micro_batches(options, world_size) * options.batch_size * options.seq_len * data_ranks;
    if (__builtin_mul_overflow(step, sequences_per_step(m), &m.data_position))
        fail("step ", step, ": expected steps that draw fewer than 2^63 sequences, found ",
             sequences_per_step(m), " per step");
    m.config = to_json(options);
    m.dtype = m.config["dtype"];
    m.grad_dtype = m.config["grad-dtype"];
    m.optimizer_state = m.config["optimizer-state"];
    m.master_weights = m.config["master-weights"];
    return m;
}

std::string records_text(const std::vector<FileRecord>& records) {
    return to_json(records).dump();
}

std::vector<FileRecord> parse_records(const std::string& text) {
    std::vector<FileRecord> records;
    for (const json& file : json::parse(text))
        records.push_back(parse_record_2(file, std::numeric_limits<int64_t>::max(), "a rank's files"));
    return records;
}

std::string manifest_text(const Manifest& m) {
    ordered_json fields = {{"format", format_2}};
    for (const auto& field : integers) fields[field.name] = m.*field.member;
    for (const auto& field : choices) fields[field.name] = m.*field.member;
    fields.update({{"kernels", m.kernels},
                   {"gemms", to_json(m.gemms)},
                   {"config", m.config},
                   {"files", to_json(m.files)}});
    std::string text = fields.dump(1);
    text.resize(text.size() - 2);  // "\n}"
    return text + seal(text);
}

bool is_whole_manifest(const std::string& text) {
    const size_t end = text.rfind(",\n");
    return end != text.npos && text.substr(end) == seal(text.substr(0, end));
}

Manifest parse_manifest(const std::string& text, const std::string& where) {
    const json object = parse_json(text, where);
    if (!object.is_object()) fail(where, ": expected a JSON object, found ", excerpt(object));
    const ManifestFields fields{object, where};
    const std::string format = fields.one_of("format", {format_2, format_1});
    if (!is_whole_manifest(text))
        fail(where, ": its checksum is not that of its text: it was changed or cut short");
    std::set<std::string> known = {"format", "kernels", "gemms", "config", "files", "xxh3"};
    for (const auto& field : integers) known.insert(field.name);
    for (const auto& field : choices) known.insert(field.name);
    fields.only(known);
    Manifest m;
    for (const auto& field : integers) m.*field.member = fields.integer(field.name, field.low);
    for (const auto& field : choices) m.*field.member = fields.one_of(field.name, field.values);
    for (const auto& item : fields.object_at("kernels").items()) {
        if (!item.value().is_string())
            fail(where, ": kernels: ", quote(item.key()), ": expected a string, found ",
                 excerpt(item.value()));
        m.kernels[item.key()] = item.value().get<std::string>();
    }
    m.gemms = parse_gemm_choices(fields.object_at("gemms"), where + ": gemms");
    m.config = fields.object_at("config");
    if (!object.contains("files")) fail(where, ": files: expected a list, found none");
    const json& files = object["files"];
    const std::string at = where + ": files";
    m.files = format == format_2 ? parse_files_2(files, m.world_size, at) : parse_files_1(files, at);
    return m;
}

}  // namespace llamac
