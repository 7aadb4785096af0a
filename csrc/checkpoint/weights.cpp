#include "checkpoint/weights.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "checkpoint/config_json.h"
#include "core/collectives.h"
#include "core/json.h"

namespace llamac {
namespace {

// Calls read(first in the whole tensor, piece of `out`) for the pieces of this rank's elements from `first` on.
template <class Read>
void read_runs(const Parameter& parameter, int64_t first, const Tensor& out, const Read& read) {
    parameter.slice.for_runs(first, out.elements(), [&](int64_t at, int64_t in_whole, int64_t count) {
        read(in_whole, make_tensor(static_cast<char*>(out.data) + (at - first) * size_of(out.dtype),
                                   out.dtype, {count}));
    });
}

// Elements first .. first+out.elements() of a tensor whose rows lie in several files.
void read_rows(const std::vector<SafetensorsFile>& files, const std::string& name, const Parameter& parameter,
               int64_t first, const Tensor& out, Upload& upload) {
    int64_t begin = 0;  // of a file's piece
    for (const SafetensorsFile& file : files) {
        const SafetensorsFile::Entry* const entry = file.find(name);
        if (!entry) continue;
        if (entry->dtype != out.dtype)
            fail(file.path(), ": ", name, " is ", llamac::name(entry->dtype), ", expected ",
                 llamac::name(out.dtype));
        std::vector<int64_t> shape = parameter.slice.whole;
        if (!entry->shape.empty()) shape[0] = entry->shape[0];
        const int64_t elements = FlatParam{0, shape}.elements();
        const int64_t from = std::max(first, begin), to = std::min(first + out.elements(), begin + elements);
        Tensor piece = out;
        piece.shape[0] = std::max<int64_t>(0, to - from);
        piece.data = static_cast<char*>(out.data) + (from - first) * size_of(out.dtype);
        file.read(name, shape, piece.shape[0] ? from - begin : 0, piece, &upload);
        begin += elements;
    }
    if (begin != parameter.slice.elements())
        fail(files[0].path(), files.size() > 1 ? " and the other ranks' files" : "", ": ", quote(name),
             ": expected ", parameter.slice.elements(), " elements, found ", begin);
}

// A tensor that files fill.
struct Part {
    std::vector<Tensor> places;
    Communicator* holders;  // the ranks that have the same part; null for one
    std::function<void(Upload&)> read;

    int64_t bytes() const {
        int64_t sum = 0;
        for (const Tensor& each : places) sum += each.bytes();
        return sum;
    }
};

Communicator* holders_of(const Readers& readers, const Parameters& p, const Parameter& parameter,
                         const Tensor& buffer) {
    return parameter.trains && p.is_shared(buffer) ? readers.shards : readers.whole;
}

// All ranks read at the same time, about as many bytes each, before they send.
void read_parts(const Readers& readers, const std::vector<Part>& parts) {
    std::map<Communicator*, std::vector<int64_t>> bytes;  // that each of the holders reads
    std::vector<int64_t> reader_of;
    for (const Part& part : parts) {
        std::vector<int64_t>& theirs = bytes[part.holders];
        theirs.resize(part.holders ? static_cast<size_t>(part.holders->size) : 1);
        const auto least = std::ranges::min_element(theirs);
        *least += part.bytes();
        reader_of.push_back(least - theirs.begin());
    }
    readers.ranks.together("weights", [&] {
        Upload upload;
        for (size_t i = 0; i < parts.size(); i++)
            if (!parts[i].holders || parts[i].holders->rank == reader_of[i]) parts[i].read(upload);
        upload.finish();
    });
    const Context context = computing_context();
    for (size_t i = 0; i < parts.size(); i++)
        for (const Tensor& place : parts[i].places)
            if (parts[i].holders) broadcast(context, *parts[i].holders, place, reader_of[i]);
    CHECK(hipStreamSynchronize(context.stream));
}

// A weight, and its master where that is kept.
template <class Files>
void add_weight(std::vector<Part>& parts, const Readers& readers, const Files& files, const std::string& name,
                const Parameters& p, const Parameter& parameter, bool master) {
    for (const Tensor& buffer :
         {p.weights_with(parameter), parameter.trains && master ? p.master : Tensor{}}) {
        if (!buffer.data) continue;
        const auto first = p.held(buffer, parameter).first;
        const Tensor to = p.held_part(buffer, parameter);
        const auto read = [&files, &p, &parameter, name, first, to](Upload& upload) {
            const Slice& slice = parameter.slice;
            if (parameter.transposed && slice.split == Split::inputs)
                files.read_transposed(name, slice.whole, {slice.axis.rank * slice.size, slice.size}, first,
                                      to, upload);
            else
                read_runs(parameter, first, to, [&](int64_t at, const Tensor& piece) {
                    if (parameter.transposed)
                        files.read_transposed(name, slice.whole, {0, slice.whole[1]}, at, piece, upload);
                    else
                        files.read(name, slice.whole, at, piece, &upload);
                });
            if (!parameter.is_encoded()) return;
            upload.finish();
            encode(computing_context(), p, parameter);
            CHECK(hipStreamSynchronize(computing_context().stream));
        };
        std::vector<Tensor> places = {to};
        if (parameter.is_encoded()) places = encoded(p, parameter);
        parts.push_back({places, holders_of(readers, p, parameter, buffer), read});
    }
}

constexpr const char* head_name = "lm_head.weight";

std::string embedding_name(const Config& config) {
    ModelParameters none;
    return parameters_before_blocks(config, none)[0].name;
}

bool has_own_head(const std::string& directory, const std::string& embedding_name) {
    const WeightFiles files(directory);
    const SafetensorsFile::Entry *const embedding = files.find(embedding_name), *const head =
                                                                                    files.find(head_name);
    if (!embedding || !head) return false;
    if (embedding->shape != head->shape) return true;
    const int64_t elements = FlatParam{0, head->shape}.elements(), piece = int64_t{1} << 20;
    std::vector<float> a(static_cast<size_t>(std::min(piece, elements))), b(a.size());
    for (int64_t first = 0; first < elements; first += piece) {
        const int64_t count = std::min(piece, elements - first);
        files.read(embedding_name, head->shape, first, make_tensor(a.data(), DType::f32, {count}));
        files.read(head_name, head->shape, first, make_tensor(b.data(), DType::f32, {count}));
        if (!std::equal(a.begin(), a.begin() + count, b.begin())) return true;
    }
    return false;
}

}  // namespace

std::vector<std::pair<std::string, Tensor>> optimizer_buffers(const Parameters& p) {
    std::vector<std::pair<std::string, Tensor>> buffers;
    for (const StateRow& state : optimizer_states) buffers.emplace_back(state.prefix, p.*state.buffer);
    buffers.emplace_back("master.", p.master);
    std::erase_if(buffers, [](const auto& each) { return !each.second.data; });
    return buffers;
}

Config load_config_of_weights(const std::string& directory, std::string& warning) {
    Config config = load_config(directory);
    const std::string embedding = embedding_name(config);
    if (config.is_bert()) {
        const WeightFiles files(directory);
        config.has_pooler = files.find("bert.pooler.dense.weight");
        config.has_next_sentence = files.find("cls.seq_relationship.weight");
        return config;
    }
    if (!config.tied || !has_own_head(directory, embedding)) return config;
    config.tied = false;
    warning = directory + ": tie_word_embeddings is true, but " + head_name + " is not " + embedding +
              ": the model is not tied";
    return config;
}

std::string load_weights(Parameters& p, const std::string& directory, const Readers& readers, bool master) {
    const WeightFiles files(directory);
    std::set<std::string> used;
    for (const Parameter& each : p.elsewhere) used.insert(each.name);
    if (p.is_tied) used.insert({head_name, "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"});
    zero(p);
    std::vector<Part> parts;
    for (const Parameter& parameter : p.table) {
        if (parameter.group.adapter) continue;
        used.insert(parameter.name);
        // Either name is the one matrix's.
        const bool is_embedding = parameter.is_copy || (p.holds_embedding() && &parameter == &p.table[0]);
        const bool is_head = p.is_tied && is_embedding && !files.find(parameter.name);
        const std::string name = is_head && files.find(head_name) ? head_name : parameter.name;
        add_weight(parts, readers, files, name, p, parameter, master);
    }
    read_parts(readers, parts);
    return files.unused(used);
}

void load_adapters(Parameters& p, const std::string& directory, const Readers& readers, bool master) {
    const SafetensorsFile file(directory + "/" + adapter_file);
    std::vector<Part> parts;
    for (const Parameter& parameter : p.table)
        if (parameter.group.adapter) add_weight(parts, readers, file, parameter.name, p, parameter, master);
    read_parts(readers, parts);
}

std::vector<NamedTensor> optimizer_tensors(const Parameters& p) {
    const int64_t group = p.sharding.rank / p.sharding.group;
    const std::vector<int64_t> groups = p.writers(p.sharding.groups());
    std::vector<NamedTensor> tensors;
    for (const auto& [prefix, buffer] : optimizer_buffers(p)) {
        for (size_t i = 0; i < p.table.size(); i++) {
            const Parameter& parameter = p.table[i];
            if (parameter.count == 0 || parameter.is_copy || groups[i] != group) continue;
            Tensor rows = p.part(buffer, parameter, parameter.first, parameter.count);
            if (parameter.shape.size() == 2)
                rows = reshape(rows, {parameter.count / parameter.shape[1], parameter.shape[1]});
            tensors.push_back({prefix + parameter.name, rows});
        }
    }
    return tensors;
}

void load_optimizer(Parameters& p, const std::vector<std::string>& paths, const Readers& readers) {
    std::vector<SafetensorsFile> files;
    files.reserve(paths.size());
    for (const std::string& path : paths) files.emplace_back(path);
    std::vector<Part> parts;
    for (const auto& [prefix, buffer] : optimizer_buffers(p))
        for (const Parameter& parameter : p.table) {
            if (!parameter.trains) continue;
            const Tensor to = p.held_part(buffer, parameter);
            parts.push_back({{to},
                             holders_of(readers, p, parameter, buffer),
                             [&files, &parameter, to, name = prefix + parameter.name,
                              first = p.held(buffer, parameter).first](Upload& upload) {
                                 read_runs(parameter, first, to, [&](int64_t at, const Tensor& piece) {
                                     read_rows(files, name, parameter, at, piece, upload);
                                 });
                             }});
        }
    read_parts(readers, parts);
}

}  // namespace llamac
