#include "run/flag_table.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "core/json.h"
#include "core/words.h"
#include "run/toml.h"

namespace llamac {
namespace {

using nlohmann::json;
using Words = std::vector<std::string>;

std::vector<int32_t> parse_ids(const std::string& list) {
    std::vector<int32_t> ids;
    for (const std::string& part : split_list(list))
        if (!parse_number(part, ids.emplace_back()) || part[0] == '-')
            fail("expected ids separated by commas, for example 17,4,250, found ", quote(part));
    return ids;
}

MemorySize parse_memory_size(const std::string& size) {
    if (size.empty()) return {};
    double number = 0;
    const auto [stop, error] = std::from_chars(size.data(), size.data() + size.size(), number);
    const std::string unit(stop, size.data() + size.size());
    const double bytes = number * (unit == "GiB" ? 1 << 30 : 1 << 20);
    if (error != std::errc() || (unit != "GiB" && unit != "MiB") || !(bytes >= 1 && bytes < 1e18))
        fail("expected a size in MiB or GiB, for example 192GiB, found ", quote(size));
    return {static_cast<int64_t>(bytes)};
}

// ---- values of flags from JSON: false for a value of another type

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
bool take(std::vector<std::string>& to, const json& value) {
    if (!value.is_array()) return false;
    to.resize(value.size());
    for (size_t i = 0; i < value.size(); i++)
        if (!take(to[i], value[i])) return false;
    return true;
}

template <class E>
bool take_choice(E& to, const json& value) {
    const std::optional<E> found = find_choice<E>(value.get<std::string>());
    to = found.value_or(E{});
    return found.has_value();
}
template <class E>
    requires std::is_enum_v<E>
bool take(E& to, const json& value) {
    return take_choice(to, value);
}
// A switch of the command line, or off and on.
bool take(bool& to, const json& value) {
    if (!value.is_boolean()) return value.is_string() && take_choice(to, value);
    to = value.get<bool>();
    return true;
}
bool take(DType& to, const json& value) {
    to = float_dtype(value.get<std::string>());
    return true;
}
bool take(std::optional<std::string>& to, const json& value) {
    std::string text;
    if (!take(text, value)) return false;
    if (text.empty()) fail("expected auto, none or a path, found \"\"");
    to = text == "auto" ? std::nullopt : std::optional(text == "none" ? "" : text);
    return true;
}
// On the command line its type is text, as that of all flags with the value auto.
bool take(std::optional<int64_t>& to, const json& value) {
    to.reset();
    if (value == "auto") return true;
    const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    if (!parse_number(text, to.emplace()) || *to < 1)
        fail("expected auto or a number from 1 on, found ", quote(text));
    return true;
}
template <class T>
bool take(std::optional<T>& to, const json& value) {
    to.reset();
    return value == "auto" || take(to.emplace(), value);
}
template <class T, class Parse>
bool take_parsed(T& to, const json& value, const Parse& parse) {
    std::string text;
    if (!take(text, value)) return false;
    to = parse(text);
    return true;
}
bool take(Recompute& to, const json& value) {
    return take_parsed(to, value, parse_recompute);
}
bool take(std::vector<int32_t>& to, const json& value) {
    return take_parsed(to, value, parse_ids);
}
bool take(MemorySize& to, const json& value) {
    return take_parsed(to, value, parse_memory_size);
}
// ---- and back

template <class T>
json as_json(const T& value) {
    if constexpr (std::is_enum_v<T> || std::is_same_v<T, bool>)
        return texts<T>[static_cast<size_t>(value)];
    else
        return value;
}
json as_json(DType value) {
    return info(value).name;
}
json as_json(const std::optional<std::string>& value) {
    return !value ? "auto" : value->empty() ? "none" : *value;
}
template <class T>
json as_json(const std::optional<T>& value) {
    return value ? as_json(*value) : "auto";
}
json as_json(const Recompute& value) {
    return text_of(value);
}
json as_json(const std::vector<int32_t>& ids) {
    std::string list;
    for (const int32_t id : ids) list += (list.empty() ? "" : ",") + std::to_string(id);
    return list;
}
json as_json(const MemorySize& size) {
    return size.bytes == 0 ? "" : std::to_string(size.bytes >> 20) + "MiB";
}

template <class T>
FlagField field(T Options::* member) {
    return {[member](Options& o, const json& value) { return take(o.*member, value); },
            [member](const Options& o) { return as_json(o.*member); }};
}
using Fields = std::map<std::string, FlagField>;
template <class... Rows>
Fields table_of(const Rows&... rows) {
    return {rows...};
}
// By the names of the members of Options.
const Fields& fields() {
#define LLAMAC_FLAG(member) Fields::value_type(#member, field(&Options::member))
    static const Fields all = table_of(
        LLAMAC_FLAG(config), LLAMAC_FLAG(print_config), LLAMAC_FLAG(list_kernels), LLAMAC_FLAG(dry_run),
        LLAMAC_FLAG(device_memory), LLAMAC_FLAG(device), LLAMAC_FLAG(devices_per_node), LLAMAC_FLAG(model),
        LLAMAC_FLAG(init), LLAMAC_FLAG(freeze), LLAMAC_FLAG(lora), LLAMAC_FLAG(lora_alpha),
        LLAMAC_FLAG(lora_targets), LLAMAC_FLAG(frozen_dtype), LLAMAC_FLAG(train_data), LLAMAC_FLAG(val_data),
        LLAMAC_FLAG(tokenizer), LLAMAC_FLAG(document_mask), LLAMAC_FLAG(mlm_probability),
        LLAMAC_FLAG(mlm_whole_words), LLAMAC_FLAG(mask_token), LLAMAC_FLAG(seq_len), LLAMAC_FLAG(batch_size),
        LLAMAC_FLAG(total_batch_size), LLAMAC_FLAG(seed), LLAMAC_FLAG(data_skip), LLAMAC_FLAG(steps),
        LLAMAC_FLAG(lr), LLAMAC_FLAG(min_lr_frac), LLAMAC_FLAG(warmup_steps), LLAMAC_FLAG(schedule),
        LLAMAC_FLAG(weight_decay), LLAMAC_FLAG(beta1), LLAMAC_FLAG(beta2), LLAMAC_FLAG(grad_clip),
        LLAMAC_FLAG(skip_nonfinite), LLAMAC_FLAG(verify_every), LLAMAC_FLAG(dtype), LLAMAC_FLAG(grad_dtype),
        LLAMAC_FLAG(loss_scale), LLAMAC_FLAG(master_weights), LLAMAC_FLAG(optimizer_state),
        LLAMAC_FLAG(matmul_dtype), LLAMAC_FLAG(fp8_recipe), LLAMAC_FLAG(fp8_gradients),
        LLAMAC_FLAG(fp8_weights), LLAMAC_FLAG(fp8_head), LLAMAC_FLAG(fp8_keep_first),
        LLAMAC_FLAG(fp8_keep_last), LLAMAC_FLAG(recompute), LLAMAC_FLAG(kernel), LLAMAC_FLAG(tune),
        LLAMAC_FLAG(gemm_cache), LLAMAC_FLAG(graphs), LLAMAC_FLAG(devices), LLAMAC_FLAG(tp), LLAMAC_FLAG(cp),
        LLAMAC_FLAG(pp), LLAMAC_FLAG(pp_chunks), LLAMAC_FLAG(zero), LLAMAC_FLAG(shard_group),
        LLAMAC_FLAG(reduce_dtype), LLAMAC_FLAG(collective_timeout), LLAMAC_FLAG(out), LLAMAC_FLAG(resume),
        LLAMAC_FLAG(checkpoint_every), LLAMAC_FLAG(keep_checkpoints), LLAMAC_FLAG(checkpoint_async),
        LLAMAC_FLAG(log_every), LLAMAC_FLAG(watchdog), LLAMAC_FLAG(val_every), LLAMAC_FLAG(val_steps),
        LLAMAC_FLAG(eval_every), LLAMAC_FLAG(eval_tasks), LLAMAC_FLAG(sample_every),
        LLAMAC_FLAG(sample_tokens), LLAMAC_FLAG(sample_temperature), LLAMAC_FLAG(sample_top_k),
        LLAMAC_FLAG(sample_prompt_ids), LLAMAC_FLAG(profile));
    return all;
}

std::string member_of(std::string flag) {
    std::replace(flag.begin(), flag.end(), '-', '_');
    return flag;
}

std::string value_name(const json& row) {
    if (row.contains("value")) return row["value"];
    std::string choices;
    for (const std::string& choice : row.value("choices", Words()))
        choices += (choices.empty() ? "" : "|") + choice;
    return !choices.empty() ? choices : row["type"] == "integer" ? "N" : row["type"] == "number" ? "X" : "";
}

std::vector<FlagRow> read_flags() {
    std::vector<FlagRow> flags;
    const json table = read_table("flags");
    for (const json& row : table.at("flag")) {
        if (row.value("only", "c") != "c") continue;
        FlagRow flag;
        flag.group = row.at("group"), flag.name = row.at("name"), flag.type = row.at("type");
        flag.value = value_name(row), flag.help = row.at("help");
        flag.alone = row.value("alone", "");
        flag.initial = row.at("default");
        flag.choices = row.value("choices", Words());
        flag.low = row.value("min", flag.low);
        flag.high_excluded = row.contains("below");
        flag.high = row.value(flag.high_excluded ? "below" : "max", flag.high);
        flag.in_file = row.value("key", true);
        flag.path = row.value("path", "");
        flag.field = fields().at(member_of(flag.name));
        flags.push_back(flag);
    }
    return flags;
}

std::string expected(const FlagRow& flag) {
    if (!flag.choices.empty()) return alternatives(flag.choices);
    const std::map<std::string, const char*> kinds = {{"text", "text in UTF-8"},
                                                      {"integer", "an integer"},
                                                      {"number", "a number"},
                                                      {"switch", "true or false"},
                                                      {"list", "a list of strings"}};
    std::string text = kinds.at(flag.type);
    const bool whole = flag.type == "integer";
    const auto bound = [&](double x) {
        return whole ? std::to_string(static_cast<int64_t>(x)) : json(x).dump();
    };
    if (std::isfinite(flag.high))
        text += " from " + bound(flag.low) + (flag.high_excluded ? " to below " : " to ") + bound(flag.high);
    else if (std::isfinite(flag.low))
        text += " of at least " + std::to_string(static_cast<int64_t>(flag.low));
    return text;
}

bool is_allowed(const FlagRow& flag, const json& value) {
    if (!flag.choices.empty())
        return value.is_string() &&
               std::count(flag.choices.begin(), flag.choices.end(), value.get<std::string>()) > 0;
    if (!value.is_number()) return true;
    const double x = value.get<double>();
    return x >= flag.low && (flag.high_excluded ? x < flag.high : x <= flag.high);
}

}  // namespace

const std::vector<FlagRow>& flags() {
    static const std::vector<FlagRow> table = read_flags();
    return table;
}

Options::Options() {
    for (const FlagRow& flag : flags()) CHECK(flag.field.set(*this, flag.initial));
}

void assign(Options& options, const FlagRow& flag, const json& value, const std::string& where) {
    bool good = false;
    try {
        good = is_allowed(flag, value) && flag.field.set(options, value);
    } catch (const Error& error) {
        fail(where, ": ", error.what());
    }
    if (!good) fail(where, ": expected ", expected(flag), ", found ", excerpt(value));
}

Recompute parse_recompute(const std::string& list) {
    Recompute r;
    if (list == "none") return r;
    const std::map<std::string, bool Recompute::*> switches = {{"norm", &Recompute::norm},
                                                               {"swiglu", &Recompute::swiglu},
                                                               {"qkv", &Recompute::qkv},
                                                               {"attention", &Recompute::attention}};
    std::vector<std::string> parts = split_list(list);
    if (parts.empty()) parts = {""};
    for (const std::string& part : parts) {
        if (const auto found = switches.find(part); found != switches.end())
            r.*found->second = true;
        else if (part == "block")
            r.block_every = 1;
        else if (part.rfind("block:", 0) != 0 || !parse_number(part.substr(6), r.block_every) ||
                 r.block_every < 1)
            fail("expected none, or a list of norm, swiglu, qkv, attention, block and block:K, found ",
                 quote(part));
    }
    return r;
}

std::string text_of(const Recompute& r) {
    std::string list;
    const auto add = [&](bool chosen, const std::string& part) {
        if (chosen) list += (list.empty() ? "" : ",") + part;
    };
    add(r.norm, "norm");
    add(r.swiglu, "swiglu");
    add(r.qkv, "qkv");
    add(r.attention, "attention");
    add(r.block_every > 0, r.block_every == 1 ? "block" : "block:" + std::to_string(r.block_every));
    return list.empty() ? "none" : list;
}

}  // namespace llamac
