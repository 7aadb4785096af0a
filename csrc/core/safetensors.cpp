#include "core/safetensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "core/device_memory.h"
#include "core/folder.h"
#include "core/json.h"

namespace llamac {
namespace {

using nlohmann::json;

constexpr int64_t max_header = 100'000'000;  // the limit of the format's own library

constexpr DTypeColumn type_name = &DTypeInfo::safetensors;

const json& field(const json& entry, const char* key, const std::string& where) {
    const auto found = entry.find(key);
    if (found == entry.end()) fail(where, ": expected ", key, ", found none");
    return *found;
}

// A non-negative integer below 2^63.
int64_t integer(const json& value, const std::string& where) {
    constexpr uint64_t max_value = std::numeric_limits<int64_t>::max();
    if (!value.is_number_unsigned() || value.get<uint64_t>() > max_value)
        fail(where, ": expected an integer from 0 to 2^63-1, found ", excerpt(value));
    return value.get<int64_t>();
}

// Types of the format that core/dtype.h lacks or that are no weights, with their bytes.
constexpr std::pair<std::string_view, int64_t> other_types[] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
    {"I16", 2},  {"U16", 2}, {"U32", 4}, {"I64", 8},     {"U64", 8},     {"C64", 8}};

// Sets the type; returns its bytes.
int64_t parse_dtype(const json& value, const std::string& where, SafetensorsFile::Entry& entry) {
    const std::string text = value.is_string() ? value.get<std::string>() : "";
    if (const auto known = find_dtype(text, type_name); known && in_files(info(*known))) {
        entry.dtype = *known;
        return size_of(*known);
    }
    for (const auto& [name, bytes] : other_types)
        if (text == name) {
            entry.other = text;
            return bytes;
        }
    fail(where, ": dtype: expected ", dtype_names(in_files, type_name), ", found ", excerpt(value));
}

std::vector<int64_t> parse_shape(const json& value, const std::string& where) {
    if (!value.is_array()) fail(where, ": shape: expected a list, found ", excerpt(value));
    if (value.size() > Tensor::max_rank)
        fail(where, ": shape: expected at most ", Tensor::max_rank, " dimensions, found ", value.size());
    std::vector<int64_t> shape;
    for (const json& size : value) shape.push_back(integer(size, where + ": shape"));
    return shape;
}

// Bytes of a tensor. A size of 0 counts as 1 in the test for overflow: strides are products without it.
int64_t bytes_of(const std::vector<int64_t>& shape, int64_t item, const std::string& where) {
    int64_t product = item;
    bool empty = false;
    for (int64_t size : shape) {
        if (__builtin_mul_overflow(product, std::max<int64_t>(size, 1), &product))
            fail(where, ": shape: expected less than 2^63 bytes, found ",
                 shape_text(shape.data(), static_cast<int>(shape.size())));
        empty |= size == 0;
    }
    return empty ? 0 : product;
}

std::string type_of(const SafetensorsFile::Entry& entry) {
    return entry.other.empty() ? info(entry.dtype).safetensors : entry.other;
}

// begin_of_data: in the file, which has data_bytes from there on.
SafetensorsFile::Entry parse_entry(const std::string& name, const json& value, int64_t begin_of_data,
                                   int64_t data_bytes, const std::string& where) {
    if (!value.is_object()) fail(where, ": expected {dtype, shape, data_offsets}, found ", excerpt(value));
    for (const auto& item : value.items())
        if (item.key() != "dtype" && item.key() != "shape" && item.key() != "data_offsets")
            fail(where, ": expected dtype, shape and data_offsets, found ", quote(item.key()));
    SafetensorsFile::Entry entry{name, DType::f32, "", {}, 0, 0};
    const int64_t item = parse_dtype(field(value, "dtype", where), where, entry);
    entry.shape = parse_shape(field(value, "shape", where), where);
    entry.bytes = bytes_of(entry.shape, item, where);
    const json& offsets = field(value, "data_offsets", where);
    if (!offsets.is_array() || offsets.size() != 2)
        fail(where, ": data_offsets: expected [begin, end], found ", excerpt(offsets));
    const int64_t begin = integer(offsets[0], where + ": data_offsets");
    const int64_t end = integer(offsets[1], where + ": data_offsets");
    if (begin > end || end > data_bytes)
        fail(where, ": data_offsets: expected begin <= end <= ", data_bytes,
             " (the bytes after the header), found [", begin, ",", end, "]");
    if (end - begin != entry.bytes)
        fail(where, ": data_offsets: expected ", entry.bytes, " bytes for ", type_of(entry), " ",
             shape_text(entry.shape.data(), static_cast<int>(entry.shape.size())), ", found ", end - begin);
    entry.offset = begin_of_data + begin;
    return entry;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : file(path) {
    constexpr int64_t prefix = 8;
    if (file.size < prefix) fail(path, ": header length: expected 8 bytes, found a file of ", file.size);
    uint8_t bytes[prefix];
    file.read(0, bytes, prefix);
    uint64_t length = 0;
    for (int i = 0; i < prefix; i++) length |= uint64_t{bytes[i]} << 8 * i;
    const int64_t max_length = std::min(file.size - prefix, max_header);
    if (length > static_cast<uint64_t>(max_length))
        fail(path, ": header length: expected at most ", max_length, ", found ", length);
    std::string header(length, '\0');
    file.read(prefix, header.data(), static_cast<int64_t>(length));
    parse_header(header, file.size - prefix - static_cast<int64_t>(length));
}

void SafetensorsFile::parse_header(std::string_view text, int64_t data_bytes) {
    const json header = parse_json(text, path() + ": header");
    if (!header.is_object()) fail(path(), ": header: expected an object, found ", excerpt(header));
    const int64_t begin_of_data = file.size - data_bytes;
    for (const auto& [name, value] : header.items()) {
        const std::string where = path() + ": " + quote(name);
        if (name != "__metadata__") {
            table.push_back(parse_entry(name, value, begin_of_data, data_bytes, where));
            continue;
        }
        if (!value.is_object()) fail(where, ": expected an object, found ", excerpt(value));
        for (const auto& [key, item] : value.items()) {
            if (!item.is_string())
                fail(where, ": ", quote(key), ": expected a string, found ", excerpt(item));
            metadata[key] = item.get<std::string>();
        }
    }
    // Each tensor begins at the end of the one before; an empty one precedes its neighbor.
    std::stable_sort(table.begin(), table.end(), [](const Entry& a, const Entry& b) {
        return a.offset != b.offset ? a.offset < b.offset : a.bytes < b.bytes;
    });
    int64_t expected = 0;
    for (const Entry& entry : table) {
        const int64_t begin = entry.offset - begin_of_data;
        if (begin != expected)
            fail(path(), ": ", quote(entry.name), ": data_offsets: expected to begin at ", expected,
                 " where the tensor before ends, found ", begin);
        expected = begin + entry.bytes;
        index[entry.name] = static_cast<size_t>(&entry - table.data());
    }
    if (expected != data_bytes)
        fail(path(), ": size: expected ", expected, " bytes after the header, found ", data_bytes);
}

const SafetensorsFile::Entry* SafetensorsFile::find(const std::string& name) const {
    const auto found = index.find(name);
    return found == index.end() ? nullptr : &table[found->second];
}

void SafetensorsFile::read(const std::string& name, const Tensor& out) const {
    read(name, {out.shape, out.shape + out.rank}, 0, out);
}

void SafetensorsFile::read(const std::string& name, const std::vector<int64_t>& shape, int64_t begin,
                           const Tensor& out, Upload* upload) const {
    CHECK(out.contiguous());
    const std::string where = path() + ": " + quote(name);
    const Entry* entry = find(name);
    if (!entry) fail(where, ": expected a tensor of this name, found none");
    if (entry->shape != shape)
        fail(where, ": shape: expected ", shape_text(shape.data(), static_cast<int>(shape.size())),
             ", found ", shape_text(entry->shape.data(), static_cast<int>(entry->shape.size())));
    const auto converts = [&](const DTypeInfo& from) {
        return from.is_integer() == info(out.dtype).is_integer();
    };
    if (!entry->other.empty() || !converts(info(entry->dtype)))
        fail(where, ": dtype: expected ", dtype_names(converts, type_name), ", found ", type_of(*entry));
    const int64_t from_size = size_of(entry->dtype), to_size = size_of(out.dtype);
    constexpr int64_t piece = Upload::max_bytes / 8;  // elements
    std::vector<char> own;
    std::vector<char>& bytes = upload ? upload->scratch : own;
    for (int64_t first = 0; first < out.elements(); first += piece) {
        const int64_t count = std::min(piece, out.elements() - first);
        const auto write = [&](void* memory) {
            const int64_t at = entry->offset + (begin + first) * from_size;
            if (entry->dtype == out.dtype) return file.read(at, memory, count * from_size);
            if (std::ssize(bytes) < count * from_size) bytes.resize(static_cast<size_t>(count * from_size));
            file.read(at, bytes.data(), count * from_size);
            convert(bytes.data(), entry->dtype, memory, out.dtype, count);
        };
        char* const to = static_cast<char*>(out.data) + first * to_size;
        if (upload) {
            upload->piece(to, count * to_size, write);
        } else {
            const HostCopy copy(to, count * to_size);
            write(copy.data);
            copy.to_device();
        }
    }
}

namespace {

// Rows first .. first+count of the transposed of from [rows,columns].
void transpose(const char* from, int64_t rows, int64_t columns, int64_t first, int64_t count, int64_t size,
               char* to) {
    constexpr int64_t tile = 16;  // rows of the result that read a cache line together
#pragma omp parallel for
    for (int64_t begin = 0; begin < count; begin += tile)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = begin; c < std::min(count, begin + tile); c++)
                std::memcpy(to + (c * rows + r) * size, from + (r * columns + first + c) * size,
                            static_cast<size_t>(size));
}

}  // namespace

void SafetensorsFile::read_transposed(const std::string& name, const std::vector<int64_t>& shape,
                                      const Columns& chosen, int64_t begin, const Tensor& out,
                                      Upload& upload) const {
    const int64_t rows = shape[0], columns = chosen.count, size = size_of(out.dtype);
    CHECK(begin % columns == 0 && out.elements() % columns == 0);
    std::vector<char> values(static_cast<size_t>(rows * columns * size));
    read(name, {shape[1], rows}, chosen.first * rows,
         make_tensor(values.data(), out.dtype, {rows * columns}));
    const int64_t at_once = std::max<int64_t>(1, Upload::max_bytes / (columns * size));
    for (int64_t row = 0, count = 0; row < out.elements() / columns; row += count) {
        count = std::min(at_once, out.elements() / columns - row);
        upload.piece(static_cast<char*>(out.data) + row * columns * size, count * columns * size,
                     [&](void* memory) {
                         transpose(values.data(), columns, rows, begin / columns + row, count, size,
                                   static_cast<char*>(memory));
                     });
    }
}

SafetensorsWriter::SafetensorsWriter(FileWriter& to, const std::vector<NamedTensor>& tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file(to) {
    const auto json_text = [](const json& value) {
        return value.dump(-1, ' ', false, json::error_handler_t::replace);
    };
    std::string header = "{\"__metadata__\":" + json_text(metadata);
    std::set<std::string> names{"__metadata__"};
    int64_t begin = 0;
    for (const auto& [name, tensor, transposed] : tensors) {
        CHECK(tensor.contiguous() && names.insert(name).second);
        std::vector<int64_t> shape(tensor.shape, tensor.shape + tensor.rank);
        if (transposed) std::ranges::reverse(shape);
        const int64_t end = begin + tensor.bytes();
        header += "," + json_text(name) + ":{\"dtype\":\"" + info(tensor.dtype).safetensors +
                  "\",\"shape\":" + shape_text(shape.data(), tensor.rank) + ",\"data_offsets\":[" +
                  std::to_string(begin) + "," + std::to_string(end) + "]}";
        begin = end;
    }
    header += "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');  // the data then begins at a multiple of 8
    CHECK(static_cast<int64_t>(header.size()) <= max_header);

    uint8_t length[8];
    for (int i = 0; i < 8; i++) length[i] = static_cast<uint8_t>(uint64_t{header.size()} >> 8 * i);
    file.write(length, sizeof(length));
    file.write(header.data(), static_cast<int64_t>(header.size()));
}

void SafetensorsWriter::write(const NamedTensor& next) {
    HostCopy copy(next.tensor.data, next.tensor.bytes());
    write(next, copy.from_device().data);
}

void SafetensorsWriter::write(const NamedTensor& next, const void* data) {
    const Tensor& t = next.tensor;
    if (!next.transposed) return file.write(data, t.bytes());
    std::vector<char> columns(static_cast<size_t>(t.bytes()));
    transpose(static_cast<const char*>(data), t.shape[0], t.shape[1], 0, t.shape[1], size_of(t.dtype),
              columns.data());
    file.write(columns.data(), t.bytes());
}

namespace {

constexpr const char *single_file = "model.safetensors", *index_file = "model.safetensors.index.json";

// By its name; llamac/model/config.py has the same. Files of an optimizer, of tokens and of a tokenizer are no weights.
bool is_of_weights(const std::string& name) {
    for (const char* other : {"optimizer", "scheduler", "scaler", "rng_state", "training_args", "tokenizer"})
        if (name.starts_with(other)) return false;
    if (name.starts_with("consolidated.")) return true;
    if (name.ends_with(".bin")) return name.find("model") != name.npos || name.find("weights") != name.npos;
    for (const char* format : {".safetensors", ".gguf", ".pth", ".pt", ".ckpt", ".h5", ".msgpack"})
        if (name.ends_with(format)) return true;
    return false;
}

}  // namespace

std::string find_weights(const std::string& directory) {
    for (const char* name : {single_file, index_file, "pytorch_model.bin", "pytorch_model.bin.index.json"})
        if (exists(directory + "/" + name)) return name;
    std::string first;
    if (exists(directory) && is_folder(directory))
        for (const std::string& name : names_in(directory))
            if (is_of_weights(name) && (first.empty() || name < first)) first = name;
    return first;
}

WeightFiles::WeightFiles(const std::string& folder) : directory(folder) {
    const std::string single = directory + "/" + single_file, listing = directory + "/" + index_file,
                      found = find_weights(directory);
    if (found != index_file && found != single_file && exists(directory + "/adapter_config.json"))
        fail(directory, ": expected a model, found adapters of one; merge them: llamac export merge ",
             directory, " NEW_DIR");
    if (found.starts_with("pytorch_model.bin"))
        fail(directory, ": expected model.safetensors, found ", found,
             " alone; convert it: python -c \"from transformers import AutoModelForCausalLM as M; "
             "M.from_pretrained('",
             directory, "', dtype='auto').save_pretrained('", directory, "')\"");
    if (found != index_file && found != single_file && !found.empty())
        fail(directory, ": expected model.safetensors, or its shards with ", index_file, ", found ",
             quote(found), "; transformers' save_pretrained() writes them");
    if (found != index_file) {
        files.emplace_back(single);
        for (const SafetensorsFile::Entry& entry : files[0].entries()) file_of[entry.name] = 0;
        return;
    }
    const json root = read_json(listing);
    if (!root.is_object() || !root.contains("weight_map") || !root["weight_map"].is_object())
        fail(listing, ": expected an object with weight_map, found ", excerpt(root));
    std::map<std::string, size_t> opened;
    for (const auto& [name, value] : root["weight_map"].items()) {
        const std::string where = listing + ": " + quote(name);
        if (!value.is_string() || !is_file_name(value.get_ref<const std::string&>()))
            fail(where, ": expected the name of a file in ", directory, ", found ", excerpt(value));
        const std::string& shard = value.get_ref<const std::string&>();
        const auto [at, is_new] = opened.emplace(shard, files.size());
        if (is_new) files.emplace_back(directory + "/" + shard);
        if (!files[at->second].find(name))
            fail(where, ": expected it in ", shard, ", found no tensor of this name");
        file_of[name] = at->second;
    }
}

std::map<std::string, size_t>::const_iterator WeightFiles::place_of(const std::string& name) const {
    std::vector<std::string> names = {name};
    // Of norms in old files of BERT.
    for (const auto& [now, before] : {std::pair{"LayerNorm.weight", "gamma"}, {"LayerNorm.bias", "beta"}})
        if (name.ends_with(now)) names.push_back(name.substr(0, name.rfind('.') + 1) + before);
    for (const char* const base : {"model.", "transformer.", "bert."})
        if (name.starts_with(base)) {
            const std::vector<std::string> whole = names;
            for (const std::string& each : whole) names.push_back(each.substr(each.find('.') + 1));
        }
    for (const std::string& own : names)
        if (const auto found = file_of.find(own); found != file_of.end()) return found;
    return file_of.end();
}

const SafetensorsFile::Entry* WeightFiles::find(const std::string& name) const {
    const auto found = place_of(name);
    return found == file_of.end() ? nullptr : files[found->second].find(found->first);
}

std::string WeightFiles::unused(const std::set<std::string>& used) const {
    // Which old files have: tables of RoPE, and GPT-2's mask.
    const std::string_view computed[] = {".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias",
                                         "embeddings.position_ids"};
    std::set<std::string> there;
    for (const std::string& name : used)
        if (const auto found = place_of(name); found != file_of.end()) there.insert(found->first);
    std::string names;
    int64_t count = 0;
    for (const auto& [name, file] : file_of) {
        const bool is_computed =
            std::ranges::any_of(computed, [&](std::string_view end) { return name.ends_with(end); });
        if (there.count(name) || is_computed) continue;
        if (++count <= 3) names += (count > 1 ? ", " : "") + quote(name);
    }
    if (count == 0) return "";
    return directory + ": the model does not use " + std::to_string(count) +
           " of the files' tensors: " + names + (count > 3 ? ", ..." : "");
}

void WeightFiles::read(const std::string& name, const std::vector<int64_t>& shape, int64_t first,
                       const Tensor& out, Upload* upload) const {
    const auto& [file, own] = found(name);
    file.read(own, shape, first, out, upload);
}

void WeightFiles::read_transposed(const std::string& name, const std::vector<int64_t>& shape,
                                  const Columns& columns, int64_t first, const Tensor& out,
                                  Upload& upload) const {
    const auto& [file, own] = found(name);
    file.read_transposed(own, shape, columns, first, out, upload);
}

std::pair<const SafetensorsFile&, const std::string&> WeightFiles::found(const std::string& name) const {
    const auto found = place_of(name);
    if (found != file_of.end()) return {files[found->second], found->first};
    std::string names;
    for (auto place = file_of.begin(); place != file_of.end() && names.size() < 100; place++)
        names += (names.empty() ? ": " : ", ") + quote(place->first);
    fail(directory, ": ", quote(name), ": expected a tensor of this name, found none among ", file_of.size(),
         names.empty() ? "" : names + ", ...");
}

}  // namespace llamac
