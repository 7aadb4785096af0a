// What a run writes: its manifest, weights and optimizer state, into a checkpoint, while training waits or goes on.
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/config_json.h"
#include "checkpoint/output.h"
#include "checkpoint/weights.h"
#include "core/registry.h"
#include "model/zero.h"
#include "platform/ranges.h"
#include "platform/usage.h"
#include "train/memory.h"
#include "train/trainer.h"

namespace llamac {
namespace {

// A file of tensors whose data lies in a copy, one behind another.
std::function<void(FileWriter&)> writing_copy(const std::vector<NamedTensor>& tensors, const char* copy) {
    return [tensors, copy](FileWriter& file) {
        const SafetensorsWriter header(file, tensors);
        file.write(copy, copy_row(tensors).bytes);
    };
}

}  // namespace

Manifest Trainer::manifest() const {
    CHECK(in_flight() == 0);
    Manifest m = describe_run(options, ranks.count, step);
    m.data_position += data_skip;
    m.config["data-skip"] = data_skip;
    for (const Operation* op : operations())
        if (const auto* chosen = model.kernels.of(*op))
            for (const Variant* v : *chosen) {
                std::string& names = m.kernels[op->name];
                names += std::string(names.empty() ? "" : ",") + v->name;
            }
    m.gemms = model.gemms.choices();
    m.sequences = train ? train->sequences : 0;
    return m;
}

void Trainer::visit_weights(
    const std::function<void(const Parameter& parameter, const Tensor& weight)>& visit) {
    const Parameters& p = model.parameters;
    model.gathered = {};
    for (const Parameter& parameter : p.table) {
        gather_weights(model, parameter.segment, -1);
        if (model.options.sharding.shares_weights()) {
            const Event gathered;
            gathered.record(model.stream.handle);
            gathered.wait();
        }
        visit(parameter, p.weight(parameter));
    }
}

int64_t Trainer::writer_of(const Parameter& parameter) const {
    return model.parameters.writer_of(parameter, ranks.count);
}

std::vector<NamedTensor> Trainer::own_weights() const {
    std::vector<NamedTensor> own;
    for (const Parameter& parameter : model.parameters.table)
        if (writer_of(parameter) == ranks.own)
            own.push_back({parameter.name, model.parameters.weight(parameter)});
    return own;
}

void Trainer::write_weights(FileWriter& file) {
    const std::vector<NamedTensor> own = own_weights();
    // Where weights are shared, all ranks take part in gathering them, also one that cannot write its own.
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
    visit_weights([&](const Parameter& parameter, const Tensor& weight) {
        if (writer_of(parameter) == ranks.own) attempt([&] { writer->write(weight); });
    });
    if (error) std::rethrow_exception(error);
}

// transformers finds the ranks' files by it.
std::string Trainer::index_text() const {
    nlohmann::ordered_json index;
    int64_t bytes = 0;
    for (const Parameter& parameter : model.parameters.table)
        bytes += parameter.elements() * size_of(model.options.precision.weights);
    index["metadata"]["total_size"] = bytes;
    for (const Parameter& parameter : model.parameters.table)
        index["weight_map"][parameter.name] = shard_name("model", ranks, writer_of(parameter));
    return index.dump(2) + "\n";
}

std::vector<NamedTensor> Trainer::own_optimizer_tensors() const {
    std::vector<NamedTensor> tensors = optimizer_tensors(model.parameters);
    if (ranks.is_first())
        for (const NamedTensor& each : fp8_tensors(model)) tensors.push_back(each);
    return tensors;
}

std::vector<CheckpointFile> Trainer::files(const char* copy) {
    std::vector<CheckpointFile> files;
    const std::vector<NamedTensor> weights = own_weights(), optimizer_state = own_optimizer_tensors();
    const std::optional<int64_t> rank = ranks.count > 1 ? std::optional(ranks.own) : std::nullopt;
    if (ranks.is_first())
        files.push_back(
            text_file("config.json", "config", config_json(config, model.options.precision.weights)));
    const std::string weights_name = shard_name("model", ranks, ranks.own),
                      optimizer_name = shard_name("optimizer", ranks, ranks.own);
    if (copy) {
        files.push_back({weights_name, "weights", rank, writing_copy(weights, copy)});
        files.push_back({optimizer_name, "optimizer", rank,
                         writing_copy(optimizer_state, copy + copy_row(weights).bytes)});
    } else {
        files.push_back({weights_name, "weights", rank, [this](FileWriter& file) { write_weights(file); },
                         [this] { visit_weights([](const Parameter&, const Tensor&) {}); }});
        files.push_back({optimizer_name, "optimizer", rank,
                         [optimizer_state](FileWriter& file) { write_safetensors(file, optimizer_state); }});
    }
    if (!ranks.is_first()) return files;
    if (ranks.count > 1) files.push_back(text_file("model.safetensors.index.json", "index", index_text()));
    for (const CarriedFile& file : carried) files.push_back(text_file(file.name, file.role, file.text));
    return files;
}

std::string Trainer::save(const OpenFolder& out) {
    const Range range("checkpoint");
    return write_checkpoint(out, options.keep_checkpoints, manifest(), files(), written, ranks);
}

bool Trainer::saves_async() const {
    const bool asked = options.checkpoint_async.value_or(model.context.backend == Backend::device);
    return asked && options.checkpoint_every > 0 && options.checkpoint_every < options.steps;
}

std::vector<NamedTensor> Trainer::state() const {
    std::vector<NamedTensor> state = own_weights();
    const std::vector<NamedTensor> rest = own_optimizer_tensors();
    state.insert(state.end(), rest.begin(), rest.end());
    return state;
}

void Trainer::prepare_async_saves() {
    if (!saves_async()) return;
    const int64_t bytes = copy_row(state()).bytes;
    const double needed = static_cast<double>(bytes * ranks.on_this_host()) / (1 << 30),
                 available = available_memory_gib();
    ranks.barrier();  // nobody takes any before all have looked
    std::unique_ptr<PinnedMemory<char>> copy;
    std::string why;
    ranks.together("pinned memory", [&] {
        try {
            // What is left is the system's, and the cache's of what is written.
            if (constexpr double share = 0.9; available > 0 && needed > share * available)
                fail("memory: the host has ", available, " GiB available, ", needed, " GiB are needed");
            copy = std::make_unique<PinnedMemory<char>>(bytes);
        } catch (const Error& error) {
            why = error.what();
        }
    });
    const std::vector<std::string> reasons = ranks.gather("pinned memory", why);
    for (size_t rank = 0; rank < reasons.size(); rank++)
        if (!reasons[rank].empty())
            return warn("--checkpoint-async: no copy of the state on rank " + std::to_string(rank) + ": " +
                        reasons[rank] + "; training pauses while a checkpoint is written");
    ranks.together("connections", [&] { async.emplace(ranks, std::move(copy)); });
}

void Trainer::start_save(const OpenFolder& out) {
    const Range range("checkpoint");
    char* to = async->copy->data;
    const auto copy = [&](const Tensor& tensor) {
        copy_bytes_async(model.context, to, tensor.data, tensor.bytes());
        to += tensor.bytes();
    };
    visit_weights([&](const Parameter& parameter, const Tensor& weight) {
        if (writer_of(parameter) == ranks.own) copy(weight);
    });
    for (const NamedTensor& each : own_optimizer_tensors()) copy(each.tensor);
    const Event copied;
    copied.record(model.stream.handle);
    copied.wait();
    ranks.together("checkpoint", [&] {
        async->start([this, &out, manifest = manifest(), files = files(async->copy->data),
                      progress = written] {
            return write_checkpoint(out, options.keep_checkpoints, manifest, files, progress, async->writers);
        });
    });
}

void Trainer::save_to(const std::string& directory) {
    std::optional<OpenFolder> parent;
    std::unique_ptr<FolderLock> lock;
    ranks.together("checkpoint", [&] {
        parent.emplace(parent_of(directory));
        if (ranks.is_first()) lock = lock_for_save(*parent, name_of(directory));
    });
    write_checkpoint_to(*parent, name_of(directory), manifest(), files(), written, ranks);
}

}  // namespace llamac
