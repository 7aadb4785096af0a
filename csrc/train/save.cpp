#include "train/save.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/checkpoint.h"
#include "checkpoint/config_json.h"
#include "checkpoint/output.h"
#include "checkpoint/weights.h"
#include "core/device_memory.h"
#include "core/registry.h"
#include "model/zero.h"
#include "platform/ranges.h"
#include "platform/usage.h"

namespace llamac {
namespace {

// ---- Whole tensors of a model that tensor parallelism divides: ranks exchange their parts, and those that write a tensor assemble
// it in host memory.

// Where a parameter is assembled.
struct Whole {
    const Parameter* parameter;
    void* to;
};

// What a rank sends: elements of a flat parameter from `first` on, of a rank of the tensor axis.
struct Sent {
    int64_t tensor_rank, first;
};

// Exchanges pieces that fit Model::collected. offset: of the flat parameter. sent: by rank; none: other ranks send the same.
void collect(Model& m, Communicator& among, const Tensor& own, int64_t offset,
             const std::vector<std::optional<Sent>>& sent, const std::vector<Whole>& wholes) {
    const int64_t size = size_of(own.dtype), piece = m.collected.bytes() / (among.size * size);
    std::vector<char> received;
    for (int64_t done = 0; done < own.elements(); done += piece) {
        const int64_t count = std::min(piece, own.elements() - done);
        const Tensor all = make_tensor(m.collected.data, own.dtype, {among.size * count});
        all_gather(m.context, among, all,
                   make_tensor(static_cast<char*>(own.data) + done * size, own.dtype, {count}));
        if (wholes.empty()) continue;
        received.resize(static_cast<size_t>(all.bytes()));
        CHECK(hipStreamSynchronize(m.context.stream));
        copy_bytes(received.data(), all.data, all.bytes());
        for (size_t rank = 0; rank < sent.size(); rank++) {
            if (!sent[rank]) continue;
            const int64_t begin = sent[rank]->first + done;
            const char* const from = received.data() + static_cast<int64_t>(rank) * count * size;
            for (const auto& [parameter, to] : wholes) {
                const int64_t before = parameter->offset - offset;
                const int64_t first = std::max<int64_t>(begin - before, 0),
                              end = std::min(begin + count - before,
                                             parameter->slice.part(sent[rank]->tensor_rank));
                parameter->slice.for_runs(sent[rank]->tensor_rank, first, end - first,
                                          [&](int64_t at, int64_t in_whole, int64_t n) {
                                              std::memcpy(static_cast<char*>(to) + in_whole * size,
                                                          from + (at + before - begin) * size,
                                                          static_cast<size_t>(n * size));
                                          });
            }
        }
    }
}

// Assembles a weight, whose part each rank of the tensor axis holds unsharded. All ranks of the axis call it. to: null on ranks
// that only send.
void collect_weight(Model& m, const Parameter& parameter, const Tensor& weight, void* to) {
    std::vector<std::optional<Sent>> sent;
    for (int64_t rank = 0; rank < m.options.tensor.ranks; rank++) sent.push_back(Sent{rank, 0});
    const std::vector<Whole> wholes = {{&parameter, to}};
    collect(m, *m.tensor, make_tensor(weight.data, weight.dtype, {parameter.slice.part(0)}), parameter.offset,
            sent, to ? wholes : std::vector<Whole>{});
}

// Assembles parameters of a flat one from a buffer of the optimizer's state. All ranks call it.
void collect_state(Model& m, const Tensor& buffer, const FlatParam& flat, const std::vector<Whole>& wholes) {
    const Axis& tensor = m.options.tensor;
    std::vector<std::optional<Sent>> sent;
    for (int64_t rank = 0; rank < m.world->size; rank++) {
        const int64_t place = rank / tensor.ranks;  // the first group has all shards
        const bool is_copy = place >= m.options.sharding.group || (!flat.split && rank % tensor.ranks > 0);
        sent.push_back(is_copy ? std::nullopt : std::optional(Sent{rank % tensor.ranks, place * flat.shard}));
    }
    collect(m, *m.world, m.parameters.own(buffer, flat), flat.offset, sent, wholes);
}

// ---- The files of a checkpoint

using Tensors = std::vector<NamedTensor>;

int64_t bytes_of(const Tensors& tensors) {
    int64_t bytes = 0;
    for (const NamedTensor& each : tensors) bytes += each.tensor.bytes();
    return bytes;
}

// A file of tensors whose data lies in a copy, one behind another.
std::function<void(FileWriter&)> writing_copy(const std::vector<NamedTensor>& tensors, const char* copy) {
    return [tensors, copy](FileWriter& file) {
        SafetensorsWriter writer(file, tensors);
        const char* from = copy;
        for (const NamedTensor& each : tensors) {
            writer.write(each, from);
            from += each.tensor.bytes();
        }
    };
}

Manifest manifest(const Trainer& t) {
    CHECK(t.in_flight() == 0);
    Manifest m = describe_run(t.options, t.ranks.count, t.step);
    m.data_position += t.data_skip;
    m.config["data-skip"] = t.data_skip;
    for (const Operation* op : operations())
        if (const auto* chosen = t.model.kernels.of(*op))
            for (const Variant* v : *chosen) {
                std::string& names = m.kernels[op->name];
                names += std::string(names.empty() ? "" : ",") + v->name;
            }
    m.gemms = t.model.gemms.choices();
    m.sequences = t.data.train ? t.data.train->sequences : 0;
    return m;
}

// The shape of a whole parameter.
Tensor shape_of(const Parameter& parameter, DType dtype) {
    const std::vector<int64_t>& whole = parameter.slice.whole;
    return whole.size() == 1 ? shaped(dtype, {whole[0]}) : shaped(dtype, {whole[0], whole[1]});
}

// The ranks that write the parameters of this stage.
struct Writers {
    const Trainer& t;
    const std::vector<int64_t> in_stage;

    explicit Writers(const Trainer& of)
        : t(of), in_stage(of.model.parameters.writers(of.mesh.ranks_per_stage())) {}
    int64_t of(const Parameter& parameter) const {
        return t.mesh.pipeline.rank * t.mesh.ranks_per_stage() +
               in_stage[&parameter - t.model.parameters.table.data()];
    }
    // Whether this rank writes the weight. PEFT reads adapters from one file.
    bool is_own_weight(const Parameter& parameter) const {
        if (t.model.lora) return parameter.group.adapter && t.ranks.is_first();
        return !parameter.is_copy && of(parameter) == t.ranks.own;
    }
    // With tensor parallelism, one rank writes all of a tensor.
    bool is_own_state(const Parameter& parameter) const {
        return parameter.trains && !parameter.is_copy && of(parameter) == t.ranks.own;
    }
};

// In an order that all stages have.
std::vector<Parameter> adapters_of_all_stages(const Parameters& p) {
    std::vector<Parameter> all;
    for (const auto* parameters : {&p.table, &p.elsewhere})
        std::ranges::copy_if(*parameters, std::back_inserter(all),
                             [](const Parameter& each) { return each.group.adapter; });
    std::ranges::sort(all, {}, &Parameter::rng_stream);
    return all;
}

Tensors own_weights(const Trainer& t) {
    const Parameters& p = t.model.parameters;
    const Writers writers(t);
    Tensors own;
    const auto add = [&](const Parameter& each) {
        own.push_back({each.name, shape_of(each, t.model.options.precision.weights), each.transposed});
    };
    for (const Parameter& parameter : p.table)
        if (writers.is_own_weight(parameter)) add(parameter);
    if (t.model.lora && t.ranks.is_first())
        for (const Parameter& parameter : adapters_of_all_stages(p))
            if (std::ranges::count(p.elsewhere, parameter.name, &Parameter::name)) add(parameter);
    return own;
}

// Writes the tensors of a file. visit: calls its argument with each of them, in their order, and takes part in the exchanges by
// which ranks collect tensors, also where this rank cannot write its own.
using Visit = std::function<void(const NamedTensor&)>;
void write_tensors(FileWriter& file, const Tensors& own, const std::function<void(const Visit&)>& visit) {
    std::optional<SafetensorsWriter> writer;
    std::exception_ptr error;
    const auto attempt = [&](const auto& write) {
        try {
            if (!error) write();
        } catch (const std::exception&) {
            error = std::current_exception();
        }
    };
    attempt([&] { writer.emplace(file, own); });
    visit([&](const NamedTensor& tensor) { attempt([&] { writer->write(tensor); }); });
    if (error) std::rethrow_exception(error);
}

// Rank 0 visits the adapters of other stages, which the first rank of each sends. sent: by the adapters' names.
void visit_adapters_elsewhere(Trainer& t, const std::map<std::string, std::string>& sent,
                              const Visit& visit) {
    const Parameters& p = t.model.parameters;
    for (const Parameter& parameter : adapters_of_all_stages(p)) {
        const auto own = sent.find(parameter.name);
        std::vector<std::string> all = t.ranks.gather("adapter", own == sent.end() ? "" : own->second);
        const auto found = std::ranges::find_if(all, [](const std::string& each) { return !each.empty(); });
        if (!t.ranks.is_first() || found == all.end()) continue;
        Tensor weight = shape_of(parameter, t.model.options.precision.weights);
        weight.data = found->data();
        visit({parameter.name, weight, parameter.transposed});
    }
}

// Those that this rank writes. All ranks call it.
void visit_own_weights(Trainer& t, const Visit& visit) {
    const bool in_stages = t.model.lora && t.mesh.pipeline.ranks > 1,
               sends = in_stages && t.mesh.pipeline.rank > 0 && t.ranks.own % t.mesh.ranks_per_stage() == 0;
    const Writers writers(t);
    const auto is_own = [&](const Parameter& parameter) {
        return t.mesh.pipeline.rank == 0 || !in_stages ? writers.is_own_weight(parameter)
                                                       : sends && parameter.group.adapter;
    };
    std::map<std::string, std::string> sent;
    visit_weights(
        t,
        [&](const Parameter& parameter, const Tensor& weight) {
            if (!is_own(parameter)) return;
            if (!sends) return visit({parameter.name, weight, parameter.transposed});
            std::string& bytes = sent[parameter.name];
            bytes.resize(static_cast<size_t>(weight.bytes()));
            copy_bytes(bytes.data(), weight.data, weight.bytes());
        },
        is_own);
    if (in_stages) visit_adapters_elsewhere(t, sent, visit);
}

// model.safetensors.index.json, by which transformers finds the files of the ranks. Every rank calls it.
std::string index_text(const Trainer& t) {
    nlohmann::ordered_json own = nlohmann::ordered_json::object();
    int64_t bytes = 0;
    for (const NamedTensor& each : own_weights(t)) {
        own[each.name] = shard_name("model", t.ranks, t.ranks.own);
        bytes += each.tensor.bytes();
    }
    nlohmann::ordered_json index;
    double all_bytes = 0;
    for (const double each : t.ranks.gather("bytes", static_cast<double>(bytes))) all_bytes += each;
    index["metadata"]["total_size"] = static_cast<int64_t>(all_bytes);
    for (const std::string& each : t.ranks.gather("index", own.dump()))
        index["weight_map"].update(nlohmann::ordered_json::parse(each));
    return index.dump(2) + "\n";
}

Tensors own_optimizer_tensors(const Trainer& t) {
    const Parameters& p = t.model.parameters;
    const Writers writers(t);
    Tensors tensors;
    if (p.tensor.ranks == 1) tensors = optimizer_tensors(p);
    for (const auto& [prefix, buffer] : optimizer_buffers(p))
        for (const Parameter& parameter : p.table)
            if (p.tensor.ranks > 1 && writers.is_own_state(parameter))
                tensors.push_back({prefix + parameter.name, shape_of(parameter, buffer.dtype)});
    if (!t.ranks.is_first()) return tensors;
    for (const auto& of : {fp8_tensors(t.model), loss_scale_tensors(t.model)})
        tensors.insert(tensors.end(), of.begin(), of.end());
    if (t.model.lora) tensors.push_back({base_name, t.model.lora->base});
    return tensors;
}

void visit_state(Trainer& t, const Visit& visit) {
    Tensors own = own_optimizer_tensors(t);
    const Parameters& p = t.model.parameters;
    const Writers writers(t);
    auto next = own.begin();
    std::vector<std::vector<char>> memory;
    for (const auto& [prefix, buffer] : optimizer_buffers(p)) {
        if (p.tensor.ranks == 1) break;
        for (const Segment& segment : p.segments)
            for (const FlatParam& flat : segment.flat_params) {
                std::vector<Whole> wholes;
                memory.clear();
                const auto begin = next;
                for (const Parameter& each : p.table)
                    if (writers.is_own_state(each) && each.offset >= flat.offset &&
                        each.offset < flat.offset + flat.elements()) {
                        next->tensor.data =
                            memory.emplace_back(static_cast<size_t>(next->tensor.bytes())).data();
                        wholes.push_back({&each, next++->tensor.data});
                    }
                collect_state(t.model, buffer, flat, wholes);
                std::for_each(begin, next, visit);
            }
    }
    std::for_each(next, own.end(), visit);
}

// adapter_config.json, as PEFT writes it.
std::string adapter_config_text(const Trainer& t) {
    const Lora& lora = t.model.options.lora;
    std::error_code none;  // a preset's name is no path
    const std::filesystem::path folder = std::filesystem::canonical(t.options.model, none);
    nlohmann::ordered_json config = {{"peft_type", "LORA"},
                                     {"task_type", "CAUSAL_LM"},
                                     {"base_model_name_or_path", none ? t.options.model : folder.string()},
                                     {"r", lora.rank},
                                     {"lora_alpha", lora.alpha},
                                     {"lora_dropout", 0.0},
                                     {"bias", "none"},
                                     {"fan_in_fan_out", false},
                                     {"init_lora_weights", true},
                                     {"inference_mode", true}};
    for (const LoraTarget& target : t.model.lora->targets)
        config["target_modules"].push_back(std::string(std::strrchr(target.module, '.') + 1));
    return config.dump(2) + "\n";
}

// copy: of the weights and the optimizer state, to be written in their place; null: there is none.
std::vector<CheckpointFile> checkpoint_files(Trainer& t, const char* copy = nullptr) {
    const Ranks& ranks = t.ranks;
    std::vector<CheckpointFile> files;
    const Tensors weights = own_weights(t), optimizer_state = own_optimizer_tensors(t);
    const std::optional<int64_t> rank = ranks.count > 1 ? std::optional(ranks.own) : std::nullopt;
    if (ranks.is_first())
        files.push_back(
            text_file("config.json", "config", config_json(t.config, t.model.options.precision.weights)));
    const bool adapters = t.model.lora.has_value(), writes_weights = !adapters || ranks.is_first();
    const std::string weights_name = adapters ? adapter_file : shard_name("model", ranks, ranks.own),
                      optimizer_name = shard_name("optimizer", ranks, ranks.own);
    const auto take_part = [&t] { visit_own_weights(t, [](const NamedTensor&) {}); };
    if (copy) {
        if (writes_weights) files.push_back({weights_name, "weights", rank, writing_copy(weights, copy)});
        files.push_back(
            {optimizer_name, "optimizer", rank, writing_copy(optimizer_state, copy + bytes_of(weights))});
    } else {
        if (writes_weights)
            files.push_back({weights_name, "weights", rank,
                             [&t, weights](FileWriter& file) {
                                 write_tensors(file, weights,
                                               [&](const Visit& visit) { visit_own_weights(t, visit); });
                             },
                             take_part});
        const auto before = [take_part, writes_weights] {
            if (!writes_weights) take_part();
        };
        files.push_back({optimizer_name, "optimizer", rank,
                         [&t, optimizer_state, before](FileWriter& file) {
                             before();
                             write_tensors(file, optimizer_state,
                                           [&](const Visit& visit) { visit_state(t, visit); });
                         },
                         [&t, before] {
                             before();
                             visit_state(t, [](const NamedTensor&) {});
                         }});
    }
    const std::string index = adapters || ranks.count == 1 ? "" : index_text(t);
    if (!ranks.is_first()) return files;
    if (adapters)
        files.push_back(text_file("adapter_config.json", "adapter", adapter_config_text(t)));
    else if (ranks.count > 1)
        files.push_back(text_file("model.safetensors.index.json", "index", index));
    for (const TokenizerFile& file : t.tokenizer_files)
        files.push_back(text_file(file.name, file.role, file.text));
    return files;
}

}  // namespace

void visit_weights(Trainer& t, const std::function<void(const Parameter&, const Tensor& weight)>& visit,
                   const std::function<bool(const Parameter&)>& wanted) {
    Model& model = t.model;
    const Parameters& p = model.parameters;
    model.gathered = {};
    // Where they stay: so ranks write at the same time.
    if (!model.options.sharding.shares_weights())
        for (int64_t segment = 0; segment < std::ssize(p.segments); segment++)
            gather_weights(model, segment, -1);
    for (const Parameter& parameter : p.table) {
        gather_weights(model, parameter.segment, -1);
        Tensor weight = decode(model.context, p, parameter);
        std::vector<char> memory;
        if (parameter.slice.split) {
            const Tensor part = weight;
            weight = shape_of(parameter, part.dtype);
            if (!wanted || wanted(parameter)) {
                memory.resize(static_cast<size_t>(weight.bytes()));
                weight.data = memory.data();
            }
            collect_weight(model, parameter, part, weight.data);
        }
        if (model.options.sharding.shares_states() || parameter.is_encoded()) {
            const Event gathered;
            gathered.record(model.stream.handle);
            gathered.wait();
        }
        visit(parameter, weight);
    }
}

std::string save(Trainer& t, const OpenFolder& out) {
    const Range range("checkpoint");
    return write_checkpoint(out, t.options.keep_checkpoints, manifest(t), checkpoint_files(t), t.written,
                            t.ranks);
}

void save_to(Trainer& t, const std::string& directory) {
    std::optional<OpenFolder> parent;
    std::unique_ptr<FolderLock> lock;
    t.ranks.together("checkpoint", [&] {
        parent.emplace(parent_of(directory));
        if (t.ranks.is_first()) lock = lock_for_save(*parent, name_of(directory));
    });
    write_checkpoint_to(*parent, name_of(directory), manifest(t), checkpoint_files(t), t.written, t.ranks);
}

bool saves_async(const Trainer& t) {
    const Options& o = t.options;
    const bool asked = o.checkpoint_async.value_or(t.model.context.backend == Backend::device);
    return asked && o.checkpoint_every > 0 && o.checkpoint_every < o.steps;
}

MemoryRow copy_row(const Trainer& t) {
    const Tensors weights = own_weights(t), optimizer_state = own_optimizer_tensors(t);
    return {"checkpoint copy (host)", std::ssize(weights) + std::ssize(optimizer_state),
            bytes_of(weights) + bytes_of(optimizer_state), true};
}

std::unique_ptr<AsyncSaves> prepare_async_saves(Trainer& t) {
    if (!saves_async(t)) return nullptr;
    const Ranks& ranks = t.ranks;
    const int64_t bytes = copy_row(t).bytes;
    const double needed = static_cast<double>(bytes * ranks.on_this_host()) / (1 << 30),
                 available = available_memory_gib();
    ranks.barrier();  // all ranks read the available memory before any allocates
    std::unique_ptr<PinnedPages> copy;
    std::string why;
    ranks.together("pinned memory", [&] {
        try {
            // The rest is for the system and for the cache of the files that are written.
            if (constexpr double share = 0.9; available > 0 && needed > share * available)
                fail("memory: the host has ", available, " GiB available, ", needed, " GiB are needed");
            copy = std::make_unique<PinnedPages>(bytes);
        } catch (const Error& error) {
            why = error.what();
        }
    });
    const std::vector<std::string> reasons = ranks.gather("pinned memory", why);
    for (size_t rank = 0; rank < reasons.size(); rank++)
        if (!reasons[rank].empty()) {
            t.warn("--checkpoint-async: no copy of the state on rank " + std::to_string(rank) + ": " +
                   reasons[rank] + "; training pauses while a checkpoint is written");
            return nullptr;
        }
    std::unique_ptr<AsyncSaves> saves;
    ranks.together("connections", [&] { saves = std::make_unique<AsyncSaves>(ranks, std::move(copy)); });
    return saves;
}

void start_save(Trainer& t, AsyncSaves& saves, const OpenFolder& out) {
    const Range range("checkpoint");
    char* to = saves.copy->data;
    const auto copy = [&](const Tensor& tensor) {
        copy_bytes_async(t.model.context, to, tensor.data, tensor.bytes());
        to += tensor.bytes();
    };
    visit_own_weights(t, [&](const NamedTensor& weight) { copy(weight.tensor); });
    visit_state(t, [&](const NamedTensor& state) { copy(state.tensor); });
    const Event copied;
    copied.record(t.model.stream.handle);
    copied.wait();
    t.ranks.together("checkpoint", [&] {
        saves.start([&saves, &out, keep = t.options.keep_checkpoints, manifest = manifest(t),
                     files = checkpoint_files(t, saves.copy->data), progress = t.written] {
            return write_checkpoint(out, keep, manifest, files, progress, saves.writers);
        });
    });
}

}  // namespace llamac
