// The flags and the TOML file: the text of --print-config is read back, and malformed input is
// refused in one line that names the flag, or the file, the line and the key.
#include <nlohmann/json.hpp>

#include "check.h"
#include "core/safetensors.h"
#include "run/options.h"
#include "run/toml.h"

using namespace llamac;
using nlohmann::json;
using nlohmann::ordered_json;
namespace fs = std::filesystem;

namespace options_checks {
namespace {

Options parse(std::vector<std::string> arguments) {
    std::vector<const char*> argv = {"train_llama3"};
    for (const std::string& a : arguments) argv.push_back(a.c_str());
    return parse_options(static_cast<int>(argv.size()), argv.data());
}

std::string toml_file(const std::string& text) {
    return put("run.toml", text);
}

bool same(const Options& a, const Options& b) {
    return to_json(a) == to_json(b);
}

TEST(check_flags) {
    const Options defaults = parse({});
    Options written;
    written.init = Init::random;  // what auto means for a preset
    check(same(defaults, written), "defaults");
    const ordered_json keys = to_json(defaults);
    check(keys.contains("steps") && !keys.contains("config") && !keys.contains("list-kernels"));
    const Options o =
        parse({"--batch-size", "4", "--lr=1e-3", "--grad-clip", "0", "--schedule", "wsd", "--kernel", "a=1",
               "--kernel=b=naive", "--steps", "5", "--steps", "7", "--print-config"});
    check(o.batch_size == 4 && o.lr == 1e-3 && o.grad_clip == 0 && o.schedule == ScheduleShape::wsd, "flags");
    check(o.kernel == std::vector<std::string>{"a=1", "b=naive"}, "a flag that may be repeated");
    check(o.steps == 7, "the last of two wins");
    check(o.print_config && !o.dry_run, "switches");
    for (const auto& [words, operation] : std::map<std::vector<std::string>, const char*>{
             {{"--list-kernels", "--steps", "3"}, "all"}, {{"--list-kernels", "rope"}, "rope"}, {{}, ""}})
        check(parse(words).list_kernels == operation, "--list-kernels");
    for (const char* none : {"--val-data=", "--val-data=none"})
        check(parse({none, "--seed", "1"}).val_data.empty(), std::string("no validation: ") + none);
    check(parse({"--val-data", ""}).val_data.empty(), "no validation: empty argument");
    check(parse({"--out", "runs/lr="}).out == "runs/lr=", "a value that ends in =");
    check(parse({"--seed", "9223372036854775807"}).seed == INT64_MAX, "largest seed");

    check(micro_batches(defaults, 1) == 1 && micro_batches(defaults, 8) == 1);
    const Options total = parse({"--batch-size", "2", "--seq-len", "8", "--total-batch-size", "64"});
    check(micro_batches(total, 1) == 4 && micro_batches(total, 2) == 2);
    refused("too many devices", {"--total-batch-size", "2 * 8 * 8 = 128", "64"},
            [&] { micro_batches(total, 8); });

    const Recompute r = parse_recompute("norm,attention,block:3");
    check(r.norm && r.attention && !r.swiglu && !r.qkv && r.block_every == 3, "recompute list");
    check(parse_recompute("block").block_every == 1 && parse_recompute("none").block_every == 0);
    check(parse_recompute("swiglu,qkv").swiglu && parse_recompute("swiglu,qkv").qkv, "recompute parts");
}

TEST(check_bad_flags) {
    const std::string endless(300, 'a');  // longer than a file's name may be
    const std::vector<std::pair<std::vector<std::string>, std::vector<std::string>>> bad = {
        {{"--steps", "-1"}, {"--steps: expected an integer of at least 0, found -1"}},
        {{"--steps", "1.5"}, {"--steps: expected an integer", "1.5"}},
        {{"--steps", "1e3"}, {"--steps: expected an integer", "1e3"}},
        {{"--steps", "5x"}, {"--steps: expected an integer", "5x"}},
        {{"--steps", ""}, {"--steps: expected an integer"}},
        {{"--steps", "9223372036854775808"}, {"--steps", "9223372036854775808"}},
        {{"--dry-run=maybe"}, {"--dry-run: expected true or false, found \"maybe\""}},
        {{"--steps"}, {"--steps: expected a value, found none"}},
        {{"--log-every", "often"}, {"--log-every: expected auto or a number from 1 on, found \"often\""}},
        {{"--out", "--steps", "5"}, {"5"}},
        {{"--out", "--steps"}, {"--out: expected a value", "--steps"}},
        {{"--out", ""}, {"--out: expected a directory"}},
        {{"--out", "\xff"}, {"--out: expected text in UTF-8"}},
        {{"--seq-len", "0"}, {"--seq-len: expected an integer of at least 1, found 0"}},
        {{"--batch-size", "0"}, {"--batch-size"}},
        {{"--batch-size", "9223372036854775807"}, {"--batch-size", "2^31"}},
        {{"--batch-size", "8388608"}, {"--batch-size 8388608 --seq-len 256", "2^31"}},
        {{"--total-batch-size", "4611686018427387904"},
         {"--total-batch-size 4611686018427387904: expected less than 2^48"}},
        {{"--total-batch-size", "3000"}, {"micro-batches do not divide it", "8 * 256 * 1 = 2048", "3000"}},
        {{"--total-batch-size", "1"}, {"--total-batch-size", "2048", "found 1"}},
        {{"--lr", "-0.1"}, {"--lr: expected a number of at least 0, found -0.1"}},
        {{"--lr", "nan"}, {"--lr: expected a number", "nan"}},
        {{"--lr", "inf"}, {"--lr: expected a number", "inf"}},
        {{"--lr", "1e999"}, {"--lr: expected a number", "1e999"}},
        {{"--min-lr-frac", "1.01"}, {"--min-lr-frac: expected a number from 0", "1.01"}},
        {{"--beta1", "1"}, {"--beta1: expected a number from 0", "below 1"}},
        {{"--beta2", "-0.1"}, {"--beta2"}},
        {{"--seed", "-1"}, {"--seed: expected an integer of at least 0"}},
        {{"--keep-checkpoints", "0"}, {"--keep-checkpoints"}},
        {{"--checkpoint-every", "-2"}, {"--checkpoint-every: expected an integer of at least -1, found -2"}},
        {{"--schedule", "step"}, {"--schedule: expected cosine, linear, constant or wsd", "step"}},
        {{"--dtype", "f16"}, {"--dtype: expected f32, bf16 or fp16", "f16"}},
        {{"--dtype", "fp16", "--grad-dtype", "bf16"}, {"--grad-dtype bf16: expected f32", "--dtype fp16"}},
        {{"--dtype", "fp16", "--master-weights", "off"}, {"--master-weights off: expected on"}},
        {{"--dtype", "fp16", "--matmul-dtype", "fp8"}, {"--matmul-dtype fp8: expected", "found fp16"}},
        {{"--dtype", "fp16", "--loss-scale", "3"}, {"--loss-scale 3: expected a power of two"}},
        {{"--loss-scale", "2"}, {"--loss-scale 2: expected", "--dtype f32"}},
        {{"--master-weights", "yes"}, {"--master-weights: expected on or off"}},
        {{"--init", "zero"}, {"--init: expected auto, random or load"}},
        {{"--init", "load"}, {"--init load", "--model", "tiny"}},
        {{"--grad-dtype", "bf16"}, {"--grad-dtype bf16", "--dtype f32"}},
        {{"--recompute", ""}, {"--recompute: expected none"}},
        {{"--recompute", "norm,"}, {"--recompute"}},
        {{"--recompute", "norm,mlp"}, {"--recompute", "mlp"}},
        {{"--recompute", "none,norm"}, {"--recompute", "none"}},
        {{"--recompute", "block:0"}, {"--recompute", "block:0"}},
        {{"--recompute", "block:2x"}, {"--recompute", "block:2x"}},
        {{"--kernel", "rmsnorm_forward"}, {"--kernel: expected OP=NAME", "rmsnorm_forward"}},
        {{"--step", "3"}, {"--step", "no such flag", "did you mean --steps?"}},
        {{"--batch_size=3"}, {"--batch_size", "did you mean --batch-size?"}},
        {{"--batch"}, {"did you mean --batch-size or --total-batch-size?"}},
        {{"--frobnicate"}, {"--frobnicate", "no such flag; --help"}},
        {{"extra"}, {"extra", "expected a flag"}},
        {{"--config", folder + "/none.toml"}, {"none.toml", "No such file"}},
        {{"--config", folder}, {folder, "expected a file"}},
        {{"--resume", ""}, {"--resume: expected auto, none or a path"}},
        {{"--init", "load", "--model", endless}, {"--init load", endless.substr(0, 50)}},
    };
    for (const auto& [arguments, words] : bad) {
        std::string what;
        for (const std::string& a : arguments) what += a + " ";
        refused(what, words, [&, &given = arguments] { parse(given); });
    }
}

TEST(check_help) {
    const std::string path = in_folder("help.txt");
    const int status = exit_code_of([&] {
        if (std::freopen(path.c_str(), "w", stdout)) parse({"--help"});
        fail("--help does not end the process");
    });
    const std::string help = get(path);
    check(status == 0, "--help ends with 0");
    const ordered_json defaults = to_json(Options());
    for (const auto& item : defaults.items())
        check(help.find("--" + item.key() + " ") != help.npos, "--help names --" + item.key());
    std::ifstream lines(path);
    for (std::string line; std::getline(lines, line);)
        check(line.size() <= 110, "--help in 110 columns: " + line);
}

TEST(check_toml) {
    const auto with = [](const std::string& text, std::vector<std::string> flags = {}) {
        flags.insert(flags.end(), {"--config", toml_file(text)});
        return parse(flags);
    };
    const Options o = with(
        "# a run\r\n lr = 1 # integer for a number\nsteps=1_000\n\"seq-len\" = +16\n\t\n'out' = 'C:\\#'\n"
        "model = \"a\\tb\\\"\\\\#\\u00e9\\U0001f642\" # c\nkernel = [ # list\n \"a=1\",\n "
        "'b=2',\n]\nval-data=\"\"");
    check(o.lr == 1 && o.steps == 1000 && o.seq_len == 16 && o.val_data.empty(), "TOML numbers");
    check(o.model == "a\tb\"\\#\u00e9\U0001f642" && o.out == "C:\\#", "TOML strings");
    check(o.kernel == std::vector<std::string>{"a=1", "b=2"}, "TOML list");
    check(same(with(""), parse({})) && same(with("kernel = []"), parse({})), "empty TOML");

    const Options both =
        with("steps = 7\nlr = 1e-5\nkernel = [\"a=1\"]\n", {"--steps", "9", "--kernel", "b=2"});
    check(both.steps == 9 && both.lr == 1e-5 && both.batch_size == 8, "flags win over the file");
    check(both.kernel == std::vector<std::string>{"b=2"}, "a list's flags win over the file's list");

    const std::vector<std::pair<std::string, std::vector<std::string>>> bad = {
        {"batch_size = 3", {"line 1", "unknown key", "batch_size", "did you mean batch-size?"}},
        {"steps = 3\n\nzzz = 3", {"line 3", "unknown key", "zzz"}},
        {"watchdog = 5", {"unknown key watchdog: expected it on the command line, as --watchdog"}},
        {"list-kernels = true", {"unknown key", "list-kernels"}},
        {"steps = 3.0", {"line 1: steps: expected an integer of at least 0, found 3.0"}},
        {"steps = -1", {"steps: expected an integer of at least 0, found -1"}},
        {"steps = true", {"steps", "found true"}},
        {"steps = \"3\"", {"steps: expected an integer", "\"3\""}},
        {"steps = [3]", {"steps: expected an integer", "[3]"}},
        {"steps = 9223372036854775808", {"line 1", "9223372036854775808", "64 bits"}},
        {"steps = 99999999999999999999", {"line 1"}},
        {"lr = inf", {"line 1", "lr", "inf"}},
        {"lr = \"3\"", {"lr: expected a number"}},
        {"model = 3", {"model: expected text", "3"}},
        {"dtype = \"f16\"", {"dtype: expected f32, bf16 or fp16", "f16"}},
        {"kernel = \"a=1\"", {"kernel: expected a list of strings"}},
        {"kernel = [1]", {"kernel: expected a list of strings", "[1]"}},
        {"kernel = [\"a=1\" \"b=1\"]", {"line 1"}},
        {"recompute = \"norm;qkv\"", {"recompute", "norm;qkv"}},
        {"total-batch-size = 100", {"total-batch-size", "2048", "100"}},
        {"[train]\nsteps = 3", {"line 1", "train", "table"}},
        {"a.b = 3", {"line 1", "a", "table"}},
        {"steps 3", {"line 1"}},
        {"\"a\\nb\" = 1\n\"a\\nb\" = 1", {"line 2"}},
        {"steps = 1979-05-27", {"line 1", "steps", "date"}},
        {"steps = 1\nsteps = 2", {"line 2", "steps"}},
        {"schedule = cosine", {"line 1"}},
        {"out = \"a", {"line 1"}},
        {"out = \"\\ud800\"", {"line 1"}},
        {"out = \"\\u0000\"", {"out: expected text"}},
        {"out = \"\xff\"", {"line 1"}},
        {std::string("out = \"a\0b\"", 11), {"line 1"}},
        // toml++ 3.3 meets these with an assertion.
        {"[#", {"line 1: expected TOML"}},
        {"steps = 3\n\n[[ #\nlr = 1", {"line 3: expected TOML"}},
    };
    for (const auto& [text, words] : bad) refused(text, words, [&, &given = text] { with(given); });
    const std::string good = to_toml(parse({"--kernel", "a=1", "--lr", "1e-5"}));
    for (size_t n = 0; n < good.size(); n++)  // cut anywhere: read, or refused, never worse
        error_of([&] { read_toml(toml_file(good.substr(0, n))); });
    passed++;
}

// A run must not begin with random weights because the given ones could not be looked at.
TEST(check_weights_of_a_directory) {
    const std::string model = fresh_folder("model");
    check(find_weights(model).empty() && find_weights("tiny").empty(), "no weights");
    fs::create_symlink("model.safetensors", model + "/model.safetensors");  // stat: too many links
    refused("weights that cannot be looked at", {"model.safetensors"}, [&] { parse({"--model", model}); });
    fs::remove(model + "/model.safetensors");
    overwrite(model + "/pytorch_model.bin", "");
    check(find_weights(model) == "pytorch_model.bin", "weights");
}

// What --print-config writes is read back. tests/model/test_agreement.py reads it with Python.
TEST(check_print_config) {
    const std::vector<std::vector<std::string>> cases = {
        {},
        {"--lr", "1e-5", "--beta2", "0.123456789012345", "--seed", "9223372036854775807", "--weight-decay",
         "0"},
        {"--lr", "1e300", "--min-lr-frac", "0.1", "--grad-clip", "5e-324", "--steps", "1"},
        {"--kernel", "a=1", "--kernel", "quote=\" and \\", "--out",
         "tab\tnewline\n\x7f\x01\u00e9\U0001f642#, '", "--recompute", "norm,block:3", "--val-data", ""},
    };
    for (size_t i = 0; i < cases.size(); i++) {
        const Options o = parse(cases[i]);
        const std::string path = toml_file(to_toml(o)), what = "print-config " + std::to_string(i);
        check(same(parse({"--config", path}), o), what + " reads back");
    }
}

}  // namespace
}  // namespace options_checks
