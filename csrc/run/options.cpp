#include "run/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/embedded.h"
#include "core/file.h"
#include "core/folder.h"
#include "core/json.h"
#include "core/safetensors.h"
#include "core/words.h"
#include "platform/stream.h"
#include "platform/terminal.h"
#include "run/flag_table.h"
#include "run/toml.h"
#include "run/version.h"

namespace llamac {
namespace {

using nlohmann::json;
// The text of the command line as JSON of the flag's type. A text that is not a number stays text, which assign() refuses.
json from_text(const FlagRow& flag, const std::string& text) {
    const auto number = [&](auto value) -> json {
        const bool is_number = parse_number(text, value);
        return is_number && std::isfinite(static_cast<double>(value)) ? json(value) : json(text);
    };
    if (flag.type == "integer") return number(int64_t{});
    if (flag.type == "number") return number(double{});
    return text;
}

std::string plain_text(const json& value) {
    return value.is_string() ? value.get<std::string>() : value.dump();
}

// " (did you mean ...?)" if a flag has a similar name.
std::string similar_flags(const std::string& name, const std::string& dashes) {
    std::vector<std::string> known;
    for (const FlagRow& flag : flags()) known.push_back(flag.name);
    return suggestion(name, known, dashes);
}

const FlagRow& flag_of(const std::string& key, const std::string& where) {
    for (const FlagRow& flag : flags())
        if (key == flag.name) {
            if (flag.in_file) return flag;
            fail(where, "unknown key ", key, ": expected it on the command line, as --", key);
        }
    fail(where, "unknown key ", quote(key), similar_flags(key, ""));
}

void read_flags_of(Options& options, const std::string& path) {
    for (const TomlEntry& entry : read_toml(path)) {
        const std::string where = path + ": line " + std::to_string(entry.line) + ": ";
        assign(options, flag_of(entry.key, where), entry.value, where + entry.key);
    }
}

// Behind the last key of a run's configuration: a file that was cut, or is another program's, lacks it.
constexpr const char* run_config_end = "# end of the run's configuration\n";

// Applies `change` to each path that the flag's value names.
template <class Change>
std::string change_paths(const FlagRow& flag, const std::string& value, const Change& change) {
    if (value.empty() || value == "auto" || value == "none") return value;
    if (flag.path == "one") return change(value);
    std::string changed;
    for (const std::string& path : split_list(value)) changed += (changed.empty() ? "" : ",") + change(path);
    return changed;
}

std::string working_directory() {
    std::error_code none;  // of a process whose directory was removed
    return std::filesystem::current_path(none).string() + "/";
}

// The file of the run that --resume asks for; "": there is none, or --config names another one.
std::string find_run_config(const Options& o) {
    if (!o.config.empty() || o.resume == "") return "";
    const std::string path = (o.resume ? parent_of(*o.resume) : o.out) + "/" + run_config_name;
    return exists(path) ? path : "";
}

// Paths below the working directory become relative, as they were given. The run lies where its file does.
void read_run_config(Options& options, const std::string& path) {
    const std::string text = read_file(path), end = run_config_end;
    if (text.size() < end.size() || text.compare(text.size() - end.size(), end.size(), end) != 0)
        fail(path, ": expected the configuration that a run wrote, down to its last line, found ",
             text.empty() ? "an empty file" : "another file or a part of it",
             "; remove it and pass the flags of the run, or pass --config FILE");
    read_flags_of(options, path);
    const std::string here = working_directory();
    for (const FlagRow& flag : flags()) {
        if (flag.path.empty()) continue;
        const std::string value = change_paths(flag, flag.field.get(options), [&](const std::string& p) {
            return p.starts_with(here) && p.size() > here.size() ? p.substr(here.size()) : p;
        });
        assign(options, flag, value, path + ": " + flag.name);
    }
    options.out = parent_of(path);
    options.run_config = path;
    options.run_values = to_json(options);
}

// The values of a flag on the command line.
struct Given {
    CLI::Option* option = nullptr;
    std::string text;
    std::vector<std::string> list;
    bool on = false;
};

void add_flags(CLI::App& app, std::vector<Given>& given) {
    for (size_t i = 0; i < flags().size(); i++) {
        const FlagRow& flag = flags()[i];
        Given& g = given[i];
        const std::string name = "--" + flag.name;
        if (flag.type == "switch") {
            g.option = app.add_flag(name, g.on);
        } else if (flag.type == "list") {
            g.option = app.add_option(name, g.list)->allow_extra_args(false);
        } else {
            g.option = app.add_option(name, g.text)->expected(flag.alone.empty() ? 1 : 0, 1);
            g.option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
        }
    }
}

void print_help(const std::string& program) {
    const size_t width = terminal_columns(stdout).value_or(default_columns);
    const size_t start = std::min<size_t>(34, width / 2);
    const auto print = [&](const std::string& flag, const std::string& help) {
        const bool fits = flag.size() < start;
        std::printf("%s%s%s\n", padded(flag, start).c_str(),
                    fits ? "" : ("\n" + std::string(start, ' ')).c_str(),
                    wrapped(help, width, start, start).c_str());
    };
    const std::string purpose =
        "Trains Llama 3. Without flags, trains the tiny preset on the text that make train_llama3 prepares. "
        "Defaults are in brackets.";
    std::printf("%s\n\nUsage: %s [OPTIONS]\n\nConfiguration:\n", wrapped(purpose, width, 0).c_str(),
                program.c_str());
    print("  -h,--help", "print this help");
    print("  --version", "print version, commit, compiler, platform and libraries");
    const Options defaults;
    std::string group = "Configuration";
    for (const FlagRow& flag : flags()) {
        if (flag.group != group) std::printf("\n%s:\n", flag.group.c_str());
        group = flag.group;
        const json value = flag.in_file ? flag.field.get(defaults) : json();
        const std::string initial = value.is_string()   ? value.get<std::string>()
                                    : value.is_number() ? value.dump()
                                                        : "";
        print("  --" + flag.name + (flag.value.empty() ? "" : " " + flag.value),
              flag.help + (initial.empty() ? "" : " [" + initial + "]"));
    }
}

void parse_command_line(CLI::App& app, int argc, const char* const* argv) {
    // CLI11 takes the argument after "--out=" for its value; after "--out" and "" it does not.
    std::vector<std::string> names;
    std::vector<const char*> arguments;
    names.reserve(static_cast<size_t>(argc));
    for (int i = 0; i < argc; i++) {
        const std::string text = argv[i];
        const bool empty_value =
            i > 0 && text.size() > 3 && text.starts_with("--") && text.find('=') == text.size() - 1;
        if (empty_value) names.push_back(text.substr(0, text.size() - 1));
        arguments.push_back(empty_value ? names.back().c_str() : argv[i]);
        if (empty_value) arguments.push_back("");
    }
    try {
        app.parse(static_cast<int>(arguments.size()), arguments.data());
    } catch (const CLI::CallForHelp&) {
        print_help(argv[0]);
        std::exit(0);
    } catch (const CLI::CallForVersion& version) {
        std::puts(version.what());
        std::exit(0);
    } catch (const CLI::ArgumentMismatch& error) {  // "--steps: 1 required TEXT missing"
        const std::string text = error.what();
        fail(text.substr(0, text.find(':')), ": expected a value, found none");
        // "Could not convert: --dry-run = maybe": all but switches are text
    } catch (const CLI::ConversionError& error) {
        const std::string text = error.what();
        const size_t name = text.find("--"), end = text.find(" = ");
        fail(text.substr(name, end - name), ": expected true or false, found ", quote(text.substr(end + 3)));
    } catch (const CLI::ParseError& error) {
        fail("the command line: ", quote(error.what()));
    }
    const std::vector<std::string> rest = app.remaining();
    if (rest.empty()) return;
    const std::string name = rest[0].substr(0, rest[0].find('='));
    if (name.starts_with("--"))
        fail(quote(name), ": no such flag", similar_flags(name.substr(2), "--"), "; --help lists them");
    fail(quote(rest[0]), ": expected a flag; --help lists them");
}

void check_lora(const Options& o) {
    if (o.lora == 0) return;
    const std::vector<std::string> known = split_list(Options().lora_targets),
                                   targets = split_list(o.lora_targets);
    for (const std::string& target : targets)
        if (std::ranges::count(known, target) == 0 || std::ranges::count(targets, target) > 1)
            fail(
                "--lora-targets: expected a list of q, k, v, o, gate, up and down, each at most once, found ",
                quote(o.lora_targets));
    if (targets.empty())
        fail("--lora-targets: expected at least one of q, k, v, o, gate, up and down, found none");
    if (!o.freeze.empty()) fail("--freeze ", o.freeze, ": expected none, since --lora freezes all weights");
    if (o.matmul_dtype == MatmulDType::fp8)
        fail("--matmul-dtype fp8: expected storage with --lora, whose products read the inputs' values");
}

void check_frozen_codes(const Options& o) {
    if (o.lora == 0 && o.freeze.empty())
        fail("--frozen-dtype fp8: expected frozen weights, by --lora or --freeze, found none");
    if (o.matmul_dtype == MatmulDType::fp8)
        fail("--frozen-dtype fp8: expected --matmul-dtype storage, found fp8");
}

// Checks combinations of values, and replaces none and auto by their meaning where the machine does not matter.
void resolve(Options& options) {
    for (std::string* data : {&options.train_data, &options.val_data})
        if (*data == "none") data->clear();
    // Another text, of another tokenizer perhaps, says nothing of this one's.
    const Options defaults;
    if (options.train_data != defaults.train_data && options.val_data == defaults.val_data)
        options.val_data.clear();
    if (!options.dry_run && (options.device_memory.bytes > 0 || !options.device.empty()))
        fail(options.device.empty() ? "--device-memory" : "--device",
             ": expected only with --dry-run, found a run");
    for (const std::string& choice : options.kernel) {
        const size_t equals = choice.find('=');
        if (equals == choice.npos || equals == 0 || equals + 1 == choice.size())
            fail("--kernel: expected OP=NAME, found ", quote(choice));
    }
    if (!options.init) options.init = find_weights(options.model).empty() ? Init::random : Init::load;
    std::error_code none;  // a path without access is no directory
    if (options.init == Init::load && !std::filesystem::is_directory(options.model, none))
        fail("--init load: expected --model to be a Hugging Face directory, found ", quote(options.model));
    const DTypeInfo &weights = info(options.dtype), &gradients = info(options.grad_dtype);
    if (gradients.mantissa_bits < weights.mantissa_bits)
        fail("--grad-dtype ", gradients.name, ": expected ", name(weights.arithmetic), ", which --dtype ",
             weights.name, " needs");
    const bool fp16 = options.dtype == DType::fp16;
    if (fp16 && !options.master_weights) fail("--master-weights off: expected on, which --dtype fp16 needs");
    for (const auto& [flag, type] :
         {std::pair{"matmul", options.matmul_dtype}, {"frozen", options.frozen_dtype}})
        if (fp16 && type == MatmulDType::fp8)
            fail("--", flag, "-dtype fp8: expected --dtype bf16 or f32, found fp16");
    int exponent;
    if (options.loss_scale != 0 && (!fp16 || std::frexp(options.loss_scale, &exponent) != 0.5))
        fail("--loss-scale ", options.loss_scale, ": expected a power of two with --dtype fp16, or 0, found ",
             fp16 ? "another number" : "--dtype " + std::string(weights.name));
    check_lora(options);
    if (options.tp > 1 && options.frozen_dtype == MatmulDType::fp8)
        fail("--tp ", options.tp, ": expected --frozen-dtype storage, found --frozen-dtype fp8");
    if (options.pp_chunks > 1 && options.pp == 1)
        fail("--pp-chunks ", options.pp_chunks, ": expected --pp of at least 2, found 1");
    if (options.frozen_dtype == MatmulDType::fp8) check_frozen_codes(options);
    if (options.out.empty()) fail("--out: expected a directory, found \"\"");
    micro_batches(options, options.tp * options.cp * options.pp);
}

}  // namespace

Options parse_options(int argc, const char* const* argv) {
    CLI::App app;
    app.set_help_flag("-h,--help");
    app.set_version_flag("--version", version_text());
    app.allow_extras();
    std::vector<Given> given(flags().size());
    add_flags(app, given);
    parse_command_line(app, argc, argv);

    Options options;
    const auto assign_flags = [&] {
        for (size_t i = 0; i < given.size(); i++) {
            const FlagRow& flag = flags()[i];
            const Given& g = given[i];
            if (g.option->count() == 0) continue;
            if (g.text.starts_with("--"))
                fail("--", flag.name, ": expected a value, found the flag ", quote(g.text));
            const std::string& text = g.text.empty() && !flag.alone.empty() ? flag.alone : g.text;
            const json value = flag.type == "list"     ? json(g.list)
                               : flag.type == "switch" ? json(g.on)
                                                       : from_text(flag, text);
            assign(options, flag, value, "--" + flag.name);
        }
    };
    assign_flags();
    if (const std::string run = find_run_config(options); !run.empty())
        read_run_config(options, run);
    else if (!options.config.empty())
        read_flags_of(options, options.config);
    assign_flags();
    resolve(options);
    return options;
}

Options parse_options(const std::optional<std::string>& config, const std::vector<OptionValues>& layers) {
    Options options;
    const auto assign_layer = [&](const OptionValues& layer) {
        for (const auto& [key, value] : layer.values.items())
            assign(options, flag_of(key, layer.where), value, layer.where + key);
    };
    if (config && !config->empty()) read_flags_of(options, *config);
    for (const OptionValues& layer : layers) assign_layer(layer);
    if (const std::string run = config ? "" : find_run_config(options); !run.empty()) {
        read_run_config(options, run);
        assign_layer(layers.back());
    }
    resolve(options);
    return options;
}

ModelOptions model_options(const Options& o, int64_t rank, int64_t ranks) {
    ModelOptions m;
    m.batch_size = o.batch_size;
    m.seq_len = o.seq_len;
    m.precision = {o.dtype, o.grad_dtype, o.optimizer_state, o.master_weights};
    m.recompute = o.recompute;
    m.kernels = o.kernel;
    const bool fp8 = o.matmul_dtype == MatmulDType::fp8;
    // For samples. In fp8 the cache would have other scales than the whole sequence.
    if (o.sample_every > 0 && !fp8) {
        const auto prompt = std::max<int64_t>(1, std::ssize(o.sample_prompt_ids));
        m.cache = {1, std::min(o.seq_len, prompt + o.sample_tokens - 1)};
    }
    m.graphs = o.graphs.value_or(graphs_by_default);
    m.skip_nonfinite = o.skip_nonfinite > 0;
    m.loss_scale = o.loss_scale;
    m.document_mask = o.document_mask;
    m.frozen = split_list(o.lora > 0 ? "*" : o.freeze);
    m.frozen_codes = o.frozen_dtype == MatmulDType::fp8;
    m.lora = {o.lora, o.lora_alpha > 0 ? o.lora_alpha : static_cast<double>(o.lora),
              split_list(o.lora_targets)};
    const Mesh mesh = mesh_of(o, rank, ranks);
    m.tensor = mesh.tensor, m.context = mesh.context, m.pipeline = mesh.pipeline;
    if (o.pp > 1) m.micro_batches_per_step = micro_batches(o, ranks), m.chunks = o.pp_chunks;
    const Axis replicas = mesh.replicas();
    m.sharding = {replicas.rank, replicas.ranks, o.zero, shard_group(o, replicas.ranks), o.reduce_dtype};
    if (!fp8) return m;
    const bool fnuz = device_properties().fp8 == Fp8Units::fnuz;
    m.fp8.emplace();
    m.fp8->scaling = o.fp8_recipe;
    m.fp8->weights = o.fp8_weights.value_or(Fp8Weights::recomputed);
    m.fp8->values = fnuz ? DType::e4m3fnuz : DType::e4m3;
    m.fp8->gradients = o.fp8_gradients == Fp8Gradients::e4m3 ? m.fp8->values
                       : fnuz                                ? DType::e5m2fnuz
                                                             : DType::e5m2;
    m.fp8->head = o.fp8_head;
    m.fp8->keep_first = o.fp8_keep_first, m.fp8->keep_last = o.fp8_keep_last;
    return m;
}

namespace {

// The axes that have several ranks, such as "--tp 2 --pp 4".
std::string axes_text(const Options& o) {
    std::string text;
    for (const auto& [name, ranks] : {std::pair{"--tp ", o.tp}, {"--cp ", o.cp}, {"--pp ", o.pp}})
        if (ranks > 1) text += (text.empty() ? "" : " ") + (name + std::to_string(ranks));
    return text;
}

}  // namespace

Mesh mesh_of(const Options& o, int64_t rank, int64_t ranks) {
    if (ranks % (o.tp * o.cp * o.pp) != 0)
        fail(axes_text(o), ": expected a divisor of the number of devices, found ", ranks, " devices");
    return make_mesh(rank, ranks, o.tp, o.cp, o.pp);
}

int64_t micro_batches(const Options& o, int64_t devices) {
    devices = mesh_of(o, 0, devices).data.ranks;
    CHECK(devices > 0);
    // Beyond, bytes of activations and of a step's tokens would not be numbers of 64 bits; no device has the
    // memory.
    constexpr int64_t max_rows = int64_t{1} << 31, max_tokens = int64_t{1} << 48;
    int64_t rows, micro;
    if (__builtin_mul_overflow(o.batch_size, o.seq_len, &rows) || rows >= max_rows ||
        __builtin_mul_overflow(rows, devices, &micro))
        fail("--batch-size ", o.batch_size, " --seq-len ", o.seq_len, ": expected a product below 2^31");
    if (o.total_batch_size >= max_tokens)
        fail("--total-batch-size ", o.total_batch_size, ": expected less than 2^48");
    if (o.total_batch_size % micro != 0)
        fail(
            "--total-batch-size: micro-batches do not divide it: expected a multiple of batch-size * "
            "seq-len * ",
            "devices", o.tp > 1 ? " / tp" : "", o.cp > 1 ? " / cp" : "", o.pp > 1 ? " / pp" : "", " = ",
            o.batch_size, " * ", o.seq_len, " * ", devices, " = ", micro, " tokens, found ",
            o.total_batch_size);
    const int64_t count = std::max<int64_t>(1, o.total_batch_size / micro);
    if (o.pp_chunks > 1 && count % o.pp != 0)
        fail("--pp-chunks ", o.pp_chunks, ": expected a multiple of --pp ", o.pp,
             " micro-batches per step, found ", count, "; --total-batch-size sets the number");
    return count;
}

int64_t shard_group(const Options& o, int64_t ranks) {
    if (o.shard_group == 0) return ranks;
    if (ranks % o.shard_group != 0)
        fail("--shard-group: expected a divisor of the number of ranks, ", ranks,
             ", or 0 for all of them, found ", o.shard_group);
    return o.shard_group;
}

nlohmann::ordered_json to_json(const Options& options) {
    nlohmann::ordered_json values;
    for (const FlagRow& flag : flags())
        if (flag.in_file) values[flag.name] = flag.field.get(options);
    return values;
}

std::string to_toml(const Options& options) {
    std::string text;
    std::string group;
    for (const FlagRow& flag : flags()) {
        if (!flag.in_file) continue;
        if (group != flag.group) {
            group = flag.group;
            text += (text.empty() ? "# " : "\n# ") + group + "\n";
        }
        text += flag.name + " = " + toml_value(flag.field.get(options)) + "\n";
    }
    return text;
}

std::string run_config(const Options& options) {
    Options absolute = options;
    const std::string here = working_directory();
    for (const FlagRow& flag : flags()) {
        if (flag.path.empty()) continue;
        const std::string value = change_paths(flag, flag.field.get(options), [&](const std::string& path) {
            const bool preset =
                flag.name == "model" && find_embedded("models/" + path + ".json") && !is_folder(path);
            return path[0] == '/' || preset ? path : here + path;
        });
        assign(absolute, flag, value, flag.name);
    }
    // The run began where it says, not where it was resumed last.
    if (!options.resume && !options.run_values.empty())
        assign(absolute, flag_of("resume", ""), options.run_values["resume"], "resume");
    return "# The configuration of this run. train_llama3 --resume auto --out DIR continues it.\n" +
           to_toml(absolute) + run_config_end;
}

std::string shell_word(const std::string& word) {
    const char* const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-";
    if (!word.empty() && word.find_first_not_of(plain) == word.npos) return word;
    std::string text = "'";
    for (const char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
    return text + "'";
}

std::string resume_command(const std::string& program, const Options& options) {
    std::string command = shell_word(program) + " --resume auto --out " + shell_word(options.out);
    const Options defaults;
    for (const FlagRow& flag : flags()) {
        const json value = flag.field.get(options);
        if (flag.in_file || flag.name == "config" || value == flag.field.get(defaults)) continue;
        command += " --" + flag.name + " " + shell_word(plain_text(value));
    }
    return command;
}

std::vector<std::pair<std::string, Rows>> configuration_rows(const Options& options) {
    std::vector<std::pair<std::string, Rows>> groups;
    for (const FlagRow& flag : flags()) {
        if (!flag.in_file) continue;
        if (groups.empty() || groups.back().first != flag.group) groups.push_back({flag.group, {}});
        groups.back().second.push_back({flag.name, plain_text(flag.field.get(options))});
    }
    return groups;
}

}  // namespace llamac
