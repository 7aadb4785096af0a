#include "run/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <variant>

#include "core/folder.h"
#include "core/json.h"
#include "core/safetensors.h"
#include "platform/error.h"
#include "run/toml.h"
#include "run/version.h"

namespace llamac {
namespace {

using nlohmann::json;
using Field = std::variant<std::string Options::*, int64_t Options::*, double Options::*, bool Options::*,
                           std::vector<std::string> Options::*>;
using Words = std::vector<std::string>;

constexpr double infinity = std::numeric_limits<double>::infinity();

struct Rule {
    Words choices = {};  // none: any
    double low = -infinity, high = infinity;
    bool high_excluded = false;
};

// A row of configs/tables/flags.toml; its default is the member's in struct Options.
struct FlagRow {
    std::string group, name;
    std::string value;  // what --help calls it
    std::string help;
    Field field;
    Rule rule;
    bool in_file;  // may stand in the TOML file
};

std::string value_name(const json& row) {
    if (row.contains("value")) return row["value"];
    std::string choices;
    for (const std::string& choice : row.value("choices", Words()))
        choices += (choices.empty() ? "" : "|") + choice;
    return !choices.empty() ? choices : row["type"] == "integer" ? "N" : row["type"] == "number" ? "X" : "";
}

std::vector<FlagRow> read_flags() {
    static const std::map<std::string, Field> fields = {
#include "run/flag_bindings.inc"
    };
    std::vector<FlagRow> flags;
    const json table = read_table("flags");
    for (const json& row : table.at("flag")) {
        if (row.value("only", "c") != "c") continue;
        const bool below = row.contains("below");
        const double high = below ? row["below"].get<double>() : row.value("max", infinity);
        flags.push_back({row.at("group"),
                         row.at("name"),
                         value_name(row),
                         row.at("help"),
                         fields.at(row.at("name")),
                         {row.value("choices", Words()), row.value("min", -infinity), high, below},
                         row.value("key", true)});
    }
    return flags;
}

const std::vector<FlagRow>& flags() {
    static const std::vector<FlagRow> table = read_flags();
    return table;
}

std::string expected(const FlagRow& flag) {
    const Rule& rule = flag.rule;
    std::string text;
    for (size_t i = 0; i < rule.choices.size(); i++)
        text += (i == 0 ? "" : i + 1 < rule.choices.size() ? ", " : " or ") + rule.choices[i];
    if (!text.empty()) return text;
    const Words kinds = {"text in UTF-8", "an integer", "a number", "true or false", "a list of strings"};
    text = kinds[flag.field.index()];
    const bool whole = std::holds_alternative<int64_t Options::*>(flag.field);
    const auto bound = [&](double x) {
        return whole ? std::to_string(static_cast<int64_t>(x)) : json(x).dump();
    };
    if (std::isfinite(rule.high))
        text += " from " + bound(rule.low) + (rule.high_excluded ? " to below " : " to ") + bound(rule.high);
    else if (std::isfinite(rule.low))
        text += " of at least " + std::to_string(static_cast<int64_t>(rule.low));
    return text;
}

// false: the value is of another type.
bool take(std::string& to, const json& value) {
    if (!value.is_string()) return false;
    to = value.get<std::string>();
    return is_utf8(to) && to.find('\0') == to.npos;  // paths end at a NUL
}
bool take(int64_t& to, const json& value) {
    if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX))
        return false;
    to = value.get<int64_t>();
    return true;
}
bool take(double& to, const json& value) {
    if (!value.is_number()) return false;
    to = value.get<double>();
    return std::isfinite(to);
}
bool take(bool& to, const json& value) {
    if (!value.is_boolean()) return false;
    to = value.get<bool>();
    return true;
}
bool take(std::vector<std::string>& to, const json& value) {
    if (!value.is_array()) return false;
    to.resize(value.size());
    for (size_t i = 0; i < value.size(); i++)
        if (!take(to[i], value[i])) return false;
    return true;
}

bool allowed(const Rule& rule, const std::string& value) {
    return rule.choices.empty() || std::count(rule.choices.begin(), rule.choices.end(), value) > 0;
}
bool allowed(const Rule& rule, double value) {
    return value >= rule.low && (rule.high_excluded ? value < rule.high : value <= rule.high);
}
bool allowed(const Rule&, const std::vector<std::string>&) {
    return true;
}

void assign(Options& options, const FlagRow& flag, const json& value, const std::string& where) {
    const bool good = std::visit(
        [&](auto field) { return take(options.*field, value) && allowed(flag.rule, options.*field); },
        flag.field);
    if (!good) fail(where, ": expected ", expected(flag), ", found ", excerpt(value));
}

// What stands on the command line, as JSON of the flag's type; what does not read as a number stays text, to
// be refused.
json from_text(const FlagRow& flag, const std::string& text) {
    const auto number = [&](auto value) -> json {
        const char* end = text.data() + text.size();
        const auto [stop, error] = std::from_chars(text.data(), end, value);
        const bool finite = std::isfinite(static_cast<double>(value));  // JSON has no other numbers
        return error == std::errc() && stop == end && finite ? json(value) : json(text);
    };
    if (std::holds_alternative<int64_t Options::*>(flag.field)) return number(int64_t{});
    if (std::holds_alternative<double Options::*>(flag.field)) return number(double{});
    return text;
}

// Levenshtein's distance.
size_t distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), size_t{0});
    for (size_t i = 0; i < a.size(); i++) {
        size_t diagonal = row[0]++;
        for (size_t j = 0; j < b.size(); j++) {
            const size_t replaced = diagonal + (a[i] != b[j]);
            diagonal = row[j + 1];
            row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
        }
    }
    return row[b.size()];
}

// " (did you mean ...?)" where a name is near enough.
std::string suggestion(const std::string& name, const std::string& dashes) {
    const FlagRow* best = nullptr;
    size_t least = 3;
    for (const FlagRow& flag : flags()) {
        if (name.size() >= flag.name.size() + least) continue;  // endless names would take endless time
        const size_t d = distance(name, flag.name);
        if (d < least) best = &flag, least = d;
    }
    return best ? " (did you mean " + dashes + best->name + "?)" : "";
}

const FlagRow& flag_of(const std::string& key, const std::string& where) {
    for (const FlagRow& flag : flags())
        if (key == flag.name) {
            if (flag.in_file) return flag;
            fail(where, "unknown key ", key, ": expected it on the command line, as --", key);
        }
    fail(where, "unknown key ", quote(key), suggestion(key, ""));
}

void read_file(Options& options, const std::string& path) {
    for (const TomlEntry& entry : read_toml(path)) {
        const std::string where = path + ": line " + std::to_string(entry.line) + ": ";
        assign(options, flag_of(entry.key, where), entry.value, where + entry.key);
    }
}

// What a flag got on the command line.
struct Given {
    CLI::Option* option = nullptr;
    std::string text;
    std::vector<std::string> list;
    bool on = false;
};

std::string default_text(const nlohmann::ordered_json& defaults, const FlagRow& flag) {
    const nlohmann::ordered_json value = defaults.value(flag.name, nlohmann::ordered_json());
    return value.is_string() ? value.get<std::string>() : value.is_number() ? value.dump() : "";
}

void add_flags(CLI::App& app, std::vector<Given>& given) {
    const nlohmann::ordered_json defaults = to_json(Options());
    for (size_t i = 0; i < flags().size(); i++) {
        const FlagRow& flag = flags()[i];
        Given& g = given[i];
        const std::string name = "--" + flag.name, initial = default_text(defaults, flag);
        const std::string help = flag.help + (initial.empty() ? "" : " [" + initial + "]");
        if (std::holds_alternative<bool Options::*>(flag.field)) {
            g.option = app.add_flag(name, g.on, help);
        } else if (std::holds_alternative<std::vector<std::string> Options::*>(flag.field)) {
            g.option = app.add_option(name, g.list, help)->allow_extra_args(false)->option_text(flag.value);
        } else {
            g.option = app.add_option(name, g.text, help)->option_text(flag.value);
            g.option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
        }
        g.option->group(flag.group);
    }
}

void parse_command_line(CLI::App& app, int argc, const char* const* argv) {
    // CLI11 takes the argument after "--out=" for its value; after "--out" and "" it does not.
    std::vector<std::string> names;
    std::vector<const char*> arguments;
    names.reserve(static_cast<size_t>(argc));
    for (int i = 0; i < argc; i++) {
        const std::string text = argv[i];
        const bool empty_value = i > 0 && text.size() > 3 && text.find('=') == text.size() - 1;
        if (empty_value) names.push_back(text.substr(0, text.size() - 1));
        arguments.push_back(empty_value ? names.back().c_str() : argv[i]);
        if (empty_value) arguments.push_back("");
    }
    try {
        app.parse(static_cast<int>(arguments.size()), arguments.data());
    } catch (const CLI::CallForHelp&) {
        std::string help = app.help();
        for (size_t at; (at = help.find("\n\n\n")) != help.npos;) help.erase(at, 1);
        std::fputs(help.c_str(), stdout);
        std::exit(0);
    } catch (const CLI::CallForVersion& version) {
        std::puts(version.what());
        std::exit(0);
    } catch (const CLI::ArgumentMismatch& error) {  // "--steps: 1 required TEXT missing"
        const std::string text = error.what();
        fail(text.substr(0, text.find(':')), ": expected a value, found none");
    } catch (const CLI::ConversionError&
                 error) {  // "Could not convert: --dry-run = maybe": all but switches are text
        const std::string text = error.what();
        const size_t name = text.find("--"), end = text.find(" = ");
        fail(text.substr(name, end - name), ": expected true or false, found ", quote(text.substr(end + 3)));
    } catch (const CLI::ParseError& error) {
        fail("the command line: ", quote(error.what()));
    }
    const std::vector<std::string> rest = app.remaining();
    if (rest.empty()) return;
    const std::string name = rest[0].substr(0, rest[0].find('='));
    if (name.rfind("--", 0) == 0)
        fail(quote(name), ": no such flag", suggestion(name.substr(2), "--"), "; --help lists them");
    fail(quote(rest[0]), ": expected a flag; --help lists them");
}

// What values are together; "none" and "auto" become what they stand for.
void resolve(Options& options) {
    for (std::string* data : {&options.train_data, &options.val_data})
        if (*data == "none") data->clear();
    // Another text, of another tokenizer perhaps, says nothing of this one's.
    if (options.train_data != Options().train_data && options.val_data == Options().val_data)
        options.val_data.clear();
    parse_recompute(options.recompute);
    if (parse_device_memory(options.device_memory) > 0 && !options.dry_run)
        fail("--device-memory: expected only with --dry-run, found a run");
    parse_prompt_ids(options.sample_prompt_ids);
    for (const std::string& choice : options.kernel) {
        const size_t equals = choice.find('=');
        if (equals == choice.npos || equals == 0 || equals + 1 == choice.size())
            fail("--kernel: expected OP=NAME, found ", quote(choice));
    }
    if (options.init == "auto") options.init = find_weights(options.model).empty() ? "random" : "load";
    std::error_code none;  // what cannot be looked at is no directory
    if (options.init == "load" && !std::filesystem::is_directory(options.model, none))
        fail("--init load: expected --model to be a Hugging Face directory, found ", quote(options.model));
    if (info(float_dtype(options.grad_dtype)).mantissa_bits < info(float_dtype(options.dtype)).mantissa_bits)
        fail("--grad-dtype ", options.grad_dtype, ": expected ", options.dtype, ", which --dtype ",
             options.dtype, " needs");
    if (options.out.empty()) fail("--out: expected a directory, found \"\"");
    if (options.resume.empty()) fail("--resume: expected auto, none or a directory, found \"\"");
    micro_batches(options, 1);
}

}  // namespace

Options parse_options(int argc, const char* const* argv) {
    CLI::App app{
        "Trains Llama 3. Without flags, trains the tiny preset on the text that make train_llama3 prepares.\n"
        "Defaults are in brackets.\n"};
    app.set_help_flag("-h,--help", "print this help")->group("Configuration");
    app.set_version_flag("--version", version_text(),
                         "print version, commit, compiler, platform and libraries")
        ->group("Configuration");
    app.get_formatter()->column_width(34);
    app.allow_extras();
    std::vector<Given> given(flags().size());
    add_flags(app, given);
    parse_command_line(app, argc, argv);

    Options options;
    const auto assign_flags = [&](bool in_file) {
        for (size_t i = 0; i < given.size(); i++) {
            const FlagRow& flag = flags()[i];
            const Given& g = given[i];
            if (g.option->count() == 0 || flag.in_file != in_file) continue;
            if (g.text.rfind("--", 0) == 0)
                fail("--", flag.name, ": expected a value, found the flag ", quote(g.text));
            const bool is_list = std::holds_alternative<std::vector<std::string> Options::*>(flag.field);
            const bool is_switch = std::holds_alternative<bool Options::*>(flag.field);
            const json value = is_list ? json(g.list) : is_switch ? json(g.on) : from_text(flag, g.text);
            assign(options, flag, value, "--" + flag.name);
        }
    };
    assign_flags(false);
    if (!options.config.empty()) read_file(options, options.config);
    assign_flags(true);
    resolve(options);
    return options;
}

Options parse_options(const std::string& config, const std::vector<OptionValues>& layers) {
    Options options;
    if (!config.empty()) read_file(options, config);
    for (const auto& [where, values] : layers)
        for (const auto& [key, value] : values.items())
            assign(options, flag_of(key, where), value, where + key);
    resolve(options);
    return options;
}

std::vector<int32_t> parse_prompt_ids(const std::string& list) {
    std::vector<int32_t> ids;
    for (size_t start = 0; start < list.size() + !list.empty();) {
        const size_t end = std::min(list.find(',', start), list.size());
        const std::string part = list.substr(start, end - start);
        start = end + 1;
        int32_t id = -1;
        const auto [stop, error] = std::from_chars(part.data(), part.data() + part.size(), id);
        if (error != std::errc() || stop != part.data() + part.size() || part[0] == '-')
            fail("--sample-prompt-ids: expected ids separated by commas, for example 17,4,250, found ",
                 quote(part));
        ids.push_back(id);
    }
    return ids;
}

int64_t parse_device_memory(const std::string& size) {
    if (size.empty()) return 0;
    double number = 0;
    const auto [stop, error] = std::from_chars(size.data(), size.data() + size.size(), number);
    const std::string unit(stop, size.data() + size.size());
    const double bytes = number * (unit == "GiB" ? 1 << 30 : 1 << 20);
    if (error != std::errc() || (unit != "GiB" && unit != "MiB") || !(bytes >= 1 && bytes < 1e18))
        fail("--device-memory: expected a size in MiB or GiB, for example 192GiB, found ", quote(size));
    return static_cast<int64_t>(bytes);
}

int64_t micro_batches(const Options& o, int64_t devices) {
    CHECK(devices > 0);
    // Beyond, bytes of activations and of a step's tokens would not be numbers of 64 bits; no device has the
    // memory.
    constexpr int64_t most_rows = int64_t{1} << 31, most_tokens = int64_t{1} << 48;
    int64_t rows, micro;
    if (__builtin_mul_overflow(o.batch_size, o.seq_len, &rows) || rows >= most_rows ||
        __builtin_mul_overflow(rows, devices, &micro))
        fail("--batch-size ", o.batch_size, " --seq-len ", o.seq_len, ": expected a product below 2^31");
    if (o.total_batch_size >= most_tokens)
        fail("--total-batch-size ", o.total_batch_size, ": expected less than 2^48");
    if (o.total_batch_size % micro != 0)
        fail(
            "--total-batch-size: micro-batches do not divide it: expected a multiple of batch-size * "
            "seq-len * ",
            "devices = ", o.batch_size, " * ", o.seq_len, " * ", devices, " = ", micro, " tokens, found ",
            o.total_batch_size);
    return std::max<int64_t>(1, o.total_batch_size / micro);
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
        if (flag.in_file) std::visit([&](auto field) { values[flag.name] = options.*field; }, flag.field);
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
        std::visit([&](auto field) { text += flag.name + " = " + toml_value(options.*field) + "\n"; },
                   flag.field);
    }
    return text;
}

std::vector<std::pair<std::string, Rows>> configuration_rows(const Options& options) {
    std::vector<std::pair<std::string, Rows>> groups;
    const nlohmann::ordered_json values = to_json(options);
    for (const FlagRow& flag : flags()) {
        if (!flag.in_file) continue;
        if (groups.empty() || groups.back().first != flag.group) groups.push_back({flag.group, {}});
        const auto& value = values[flag.name];
        groups.back().second.push_back(
            {flag.name, value.is_string() ? value.get<std::string>() : value.dump()});
    }
    return groups;
}

Recompute parse_recompute(const std::string& list) {
    Recompute r;
    if (list == "none") return r;
    for (size_t start = 0; start <= list.size();) {
        const size_t end = std::min(list.find(',', start), list.size());
        const std::string part = list.substr(start, end - start);
        start = end + 1;
        bool known = true;
        if (part == "norm")
            r.norm = true;
        else if (part == "swiglu")
            r.swiglu = true;
        else if (part == "qkv")
            r.qkv = true;
        else if (part == "attention")
            r.attention = true;
        else if (part == "block")
            r.block_every = 1;
        else if (part.rfind("block:", 0) == 0) {
            const char* last = part.data() + part.size();
            const auto [stop, error] = std::from_chars(part.data() + 6, last, r.block_every);
            known = error == std::errc() && stop == last && r.block_every >= 1;
        } else
            known = false;
        if (!known)
            fail(
                "--recompute: expected none, or a list of norm, swiglu, qkv, attention, block and block:K, "
                "found ",
                quote(part));
    }
    return r;
}

}  // namespace llamac
