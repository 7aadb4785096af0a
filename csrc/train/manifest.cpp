#include "train/manifest.h"

#include <xxhash.h>

#include <algorithm>

#include "core/error.h"
#include "core/file.h"

namespace llamac {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* manifest_format = "llamac checkpoint 1";
const char* const checkpoint_files[] = {"config.json", "model.safetensors", "optimizer.safetensors"};

// The manifest's last line is a checksum of all bytes before it: no change to the file goes unseen.
std::string seal(const std::string& text) {
    return ",\n \"xxh3\": \"" + hex(XXH3_64bits(text.data(), text.size())) + "\"\n}\n";
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

}  // namespace llamac
