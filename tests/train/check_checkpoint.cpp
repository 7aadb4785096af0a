// Checkpoints: what is written reads back, what is malformed, cut short or interrupted is refused in one line that
// names it, and no earlier checkpoint is lost; what a run may resume. Which checkpoint it resumes: check_output.cpp.
#include "check.h"

#include <xxhash.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/resume.h"
#include "core/folder.h"
#include "safetensors_file.h"

using namespace llamac;
namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

namespace checkpoint_checks {
namespace {

Options with_flags(std::vector<const char*> flags) {
    flags.insert(flags.begin(), "train_llama3");
    return parse_options(static_cast<int>(flags.size()), flags.data());
}

float weight_data[6] = {1, 2, 3, 4, 5, 6}, moment_data[2][6];

std::string save(const std::string& out, int64_t step, int64_t keep = 100) {
    weight_data[0] = static_cast<float>(step);
    Manifest m = describe_run(Options(), 1, step);
    m.kernels = {{"rmsnorm_forward", "2"}};
    m.sequences = 123;
    m.gemms = {"Some Device", "someBLASLt 1", {{"nt 8x6x4 f32 f32", {"00ff", 0.375, 32}}}};
    const Tensor w = make_tensor(weight_data, DType::f32, {2, 3});
    const auto file = [](const char* name, const char* role, const std::vector<NamedTensor>& tensors) {
        return CheckpointFile{name, role, {}, [=](FileWriter& to) { write_safetensors(to, tensors); }};
    };
    const std::vector<CheckpointFile> files{
        text_file("config.json", "config", "{\"model_type\": \"llama\"}\n"),
        file("model.safetensors", "weights", {{"w", w}}),
        file("optimizer.safetensors", "optimizer",
             {{"m.w", make_tensor(moment_data[0], DType::f32, {2, 3})},
              {"v.w", make_tensor(moment_data[1], DType::f32, {2, 3})}})};
    return write_checkpoint(OpenFolder(out), keep, m, files);
}

TEST(check_checkpoint) {
    const std::string out = fresh_folder("checkpoint");
    check(find_checkpoint(out, {}).directory.empty(), "auto with no checkpoint starts anew");
    check(find_checkpoint(folder + "/none", {}).directory.empty(), "auto with no directory starts anew");
    const std::string path = save(out, 7);
    check(path == out + "/step_000007" && names_in(out) == std::vector<std::string>{"step_000007"});
    check(names_in(path) == std::vector<std::string>{"config.json", "manifest.json", "model.safetensors",
                                                     "optimizer.safetensors"});
    const Manifest m = open_checkpoint(path);
    check(m.step == 7 && m.data_position == 56 && m.seed == 42 && m.world_size == 1, "manifest's numbers");
    check(m.seq_len == 256 && m.batch_size == 8 && m.sequences == 123 && m.total_batch_size == 2048);
    check(m.dtype == "f32" && m.grad_dtype == "f32" && m.optimizer_state == "f32" &&
          m.master_weights == "on");
    check(m.kernels.size() == 1 && m.kernels.at("rmsnorm_forward") == "2", "manifest's kernels");
    check(to_json(m.gemms).dump() ==
          R"({"device":"Some Device","library":"someBLASLt 1","choices":{"nt 8x6x4 f32 f32":)"
          R"({"ms":0.375,"tried":32,"algorithm":"00ff"}}})");
    check(m.config == json(to_json(Options())), "manifest's configuration");
    check(m.files.size() == 3 && m.files[0].name == "config.json" && m.files[0].bytes == 24);
    const std::vector<std::string> roles = {"config", "weights", "optimizer"};
    for (size_t i = 0; i < roles.size(); i++)
        check(m.files[i].role == roles[i] && !m.files[i].rank, "role and rank of " + m.files[i].name);
    const SafetensorsFile model(path + "/model.safetensors"), optimizer(path + "/optimizer.safetensors");
    float weights[6];
    model.read("w", make_tensor(weights, DType::f32, {2, 3}));
    check(weights[0] == 7 && model.metadata.at("format") == "pt", "weights");
    check(optimizer.find("m.w") && optimizer.find("v.w"), "optimizer's tensors");

    save(out, 10);
    save(out, 1000000);
    const ResumePoint newest = find_checkpoint(out, {});
    check(newest.directory == out + "/step_1000000" && newest.manifest->step == 1000000 &&
          newest.damaged.empty());
    check(find_checkpoint(out, "").directory.empty() && !find_checkpoint(out, "").manifest, "none");
    check(find_checkpoint("", out + "/step_000010/").manifest->step == 10, "a directory");
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
    check(names_in(out) == expected);
}

TEST(check_resume_rules) {
    Manifest far = describe_run(Options(), 1, 1);
    far.step = int64_t{1} << 62;
    refused("a step that no run of these options reaches", {"d: ", "at most --steps 600"},
            [&] { check_resume(far, "d", Options()); });
    refused("more sequences than are counted", {"fewer than 2^63 sequences"},
            [&] { check_resume(far, "d", with_flags({"--steps", "4611686018427387905"})); });
    const Manifest m = describe_run(Options(), 1, 100);
    check(error_of([&] {
              check_resume(m, "d",
                           with_flags({"--lr", "1", "--batch-size", "4", "--total-batch-size", "2048"}));
          }).empty());
    check(error_of([&] { check_resume(m, "d", with_flags({"--batch-size", "4"}), 2); }).empty());
    check(changed_flags(&m, Options(), 5).empty());
    Manifest counted = m;
    counted.sequences = 7;
    const std::string changed =
        changed_flags(&counted, with_flags({"--lr", "1", "--out", "x", "--sample-every", "1"}), 5);
    check(changed ==
              "--lr was 0.003, is 1.0, --sample-every was 200, is 1, sequences of training data, whose order "
              "depends on their number: was 7, is 5",
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

using Damaged =
    std::function<void(const std::string& what, const std::string& text, const std::string& word)>;

// Entries of the list of files.
void check_bad_records(const ordered_json& fields, const Damaged& damaged) {
    const auto with = [&](const char* field, const ordered_json& value) {
        ordered_json changed = fields;
        changed["files"][1][field] = value;
        return sealed(changed);
    };
    const std::vector<ordered_json> wrong_names = {"../x", "/etc/x", "a/b",           "a\\b", "",     ".",
                                                   "..",   ".x",     "manifest.json", 1,      nullptr};
    for (const ordered_json& name : wrong_names)
        damaged("a file called " + name.dump(), with("name", name), "files: 1: name: ");
    damaged("a name twice", with("name", "config.json"), "files: 1: name: found \"config.json\" twice");
    damaged("unknown field of a file", with("x", 1), "files: 1: unknown field \"x\"");
    damaged("negative size", with("bytes", -1), "files: 1: bytes");
    damaged("short hash", with("xxh3", "12"), "files: 1: xxh3");
    damaged("hash of other digits", with("xxh3", "0123456789ABCDEF"), "files: 1: xxh3");
    damaged("role of another type", with("role", 1), "files: 1: role");
    const std::vector<ordered_json> wrong_ranks = {1, -1, "0", 0.5};
    for (const ordered_json& rank : wrong_ranks)
        damaged("rank " + rank.dump() + " of one", with("rank", rank), "files: 1: rank");
    for (const char* field : {"name", "bytes", "xxh3", "role", "rank"}) {
        ordered_json without = fields;
        without["files"][1].erase(field);
        damaged(std::string("a file without ") + field, sealed(without), std::string("files: 1: ") + field);
    }
    const char* const roles[] = {"config", "weights", "optimizer"};
    for (size_t i = 0; i < 3; i++) {
        ordered_json without = fields;
        without["files"].erase(i);
        damaged(std::string("no file of the role ") + roles[i], sealed(without), roles[i]);
    }
    ordered_json number = fields;
    number["files"][2] = 3;
    damaged("a file that is a number", sealed(number), "files: 2: expected an object, found 3");
}

TEST(check_bad_manifests) {
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
    damaged("a later format", with(json::json_pointer("/format"), "llamac checkpoint 3"),
            "expected llamac checkpoint 2 or llamac checkpoint 1");
    check_bad_records(fields, damaged);
    damaged("kernel of another type", with(json::json_pointer("/kernels/x"), 2), "kernels: \"x\"");
    for (const char* field : {"device", "library", "choices"}) {
        ordered_json without = fields;
        without["gemms"].erase(field);
        damaged(std::string("matrix products without ") + field, sealed(without),
                "gemms: expected device, library");
    }
    damaged("a matrix product of another type", with(json::json_pointer("/gemms/choices/x"), 2),
            "gemms: expected");
    damaged("deep manifest", std::string(100000, '['), ": ");
    damaged("empty manifest", "", ": ");
    damaged("a list", "[]", "object");
    overwrite(file, good);
    check(open_checkpoint(path).step == 3, "the undamaged manifest");
}

// A later version may list more files: they are verified, and left alone.
TEST(check_further_files) {
    const std::string path = save(fresh_folder("further"), 3), file = path + "/manifest.json";
    overwrite(path + "/scales_0.bin", "12345678");
    ordered_json fields = ordered_json::parse(get(file));
    fields.erase("xxh3");
    char hash[17];
    std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(XXH3_64bits("12345678", 8)));
    fields["files"].push_back(
        {{"name", "scales_0.bin"}, {"bytes", 8}, {"xxh3", hash}, {"role", "scales"}, {"rank", 0}});
    overwrite(file, sealed(fields));
    const Manifest m = open_checkpoint(path);
    check(m.files.size() == 4 && m.files[3].role == "scales" && m.files[3].rank == 0);
    overwrite(path + "/scales_0.bin", "12345679");
    refused("its file damaged", {"scales_0.bin", "checksum"}, [&] { open_checkpoint(path); });
}

// Format 1 had an object of three names. tests/data has a checkpoint of it that the program resumes.
TEST(check_first_format) {
    const std::string path = save(fresh_folder("first"), 3), file = path + "/manifest.json";
    ordered_json fields = ordered_json::parse(get(file)), files = ordered_json::object();
    fields.erase("xxh3");
    for (const auto& record : fields["files"])
        files[record["name"].get<std::string>()] = {{"bytes", record["bytes"]}, {"xxh3", record["xxh3"]}};
    fields["format"] = "llamac checkpoint 1";
    fields["files"] = files;
    overwrite(file, sealed(fields));
    const Manifest m = open_checkpoint(path);
    check(m.step == 3 && m.files.size() == 3 && m.files[1].name == "model.safetensors" &&
          m.files[1].role == "weights");
    const auto damaged = [&](const char* what, const std::function<void(ordered_json&)>& change,
                             const char* word) {
        ordered_json changed = fields;
        change(changed);
        overwrite(file, sealed(changed));
        refused(what, {file, word}, [&] { open_checkpoint(path); });
    };
    damaged(
        "format 1 without a file", [](ordered_json& f) { f["files"].erase("model.safetensors"); },
        "files: model.safetensors: expected an object, found none");
    damaged(
        "format 1 with another file", [&](ordered_json& f) { f["files"]["x"] = files["config.json"]; },
        "files: unknown field \"x\"");
    damaged(
        "format 1 with a field more", [](ordered_json& f) { f["files"]["config.json"]["role"] = "config"; },
        "files: config.json: unknown field \"role\"");
    damaged(
        "format 1 with a list", [](ordered_json& f) { f["files"] = ordered_json::array(); },
        "expected an object");
    damaged(
        "format 2 with an object", [](ordered_json& f) { f["format"] = "llamac checkpoint 2"; },
        "expected a list");
}

TEST(check_bad_files) {
    const std::string out = fresh_folder("files"), path = save(out, 3);
    for (const char* name : {"config.json", "model.safetensors", "optimizer.safetensors"}) {
        const std::string file = path + "/" + name, good = get(file);
        const auto damaged = [&](const std::string& what, const std::string& bytes) {
            overwrite(file, bytes);
            const char* reason = bytes.size() == good.size() ? "checksum" : "bytes";
            refused(what, {file, reason}, [&] { open_checkpoint(path); });
        };
        std::string flipped = good;
        flipped.back() = static_cast<char>(flipped.back() ^ 1);
        damaged(std::string(name) + " with a bit changed", flipped);
        damaged(std::string(name) + " cut", good.substr(0, good.size() - 1));
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
}

// A disk that is full at any point of the write: the earlier checkpoint stays, the new one leaves nothing.
TEST(check_full_disk) {
    const std::string out = fresh_folder("full_disk"), earlier = save(out, 1);
    size_t largest = 0;
    for (const auto& entry : fs::directory_iterator(earlier))
        largest = std::max<size_t>(largest, entry.file_size());
    for (const size_t limit : {size_t{0}, size_t{10}, largest / 2, largest - 1}) {
        const std::string message = error_with_file_limit(limit, [&] { save(out, 2, 1); });
        const std::string what = "files of at most " + std::to_string(limit) + " bytes: ";
        check(message.find("File too large") != message.npos, what + message);
        check(names_in(out) == std::vector<std::string>{"step_000001"}, what + "nothing is left behind");
        check(open_checkpoint(earlier).step == 1, what + "the earlier checkpoint is intact");
    }
    save(out, 2, 1);
    check(names_in(out) == std::vector<std::string>{"step_000002"}, "with room again");
}

}  // namespace
}  // namespace checkpoint_checks
