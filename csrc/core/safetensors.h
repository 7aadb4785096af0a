// safetensors: a 64-bit little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
// data. Format: https://huggingface.co/docs/safetensors
#pragma once
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "core/file.h"
#include "core/tensor.h"
#include "core/upload.h"

namespace llamac {

// Of a matrix.
struct Columns {
    int64_t first, count;
};

// A file's tensors, checked when it is opened (Error): sizes, overflow, offsets without gap, overlap or rest;
// the types of the format, of up to 4 dimensions. Those that core/dtype.h lacks cannot be read.
struct SafetensorsFile {
    struct Entry {
        std::string name;
        DType dtype;
        std::string other;  // the type's name where core/dtype.h has none for it; dtype is then meaningless
        std::vector<int64_t> shape;
        int64_t offset;  // of its data in the file
        int64_t bytes;
    };

    explicit SafetensorsFile(const std::string& path);

    const std::string& path() const { return file.path; }
    // In the order of their data.
    const std::vector<Entry>& entries() const { return table; }
    // Null where there is none of that name.
    const Entry* find(const std::string& name) const;
    // Copies a tensor into out (host or device memory, contiguous), converting between floating-point types: rounds to
    // nearest, ties to even (f64 to bf16 by way of f32). Error where it is missing, has another shape, or is
    // an integer where out is not, or the reverse.
    void read(const std::string& name, const Tensor& out) const;
    // The same of elements first .. first+out.elements() of a tensor of that shape. upload: for many tensors; its finish() is
    // the caller's.
    void read(const std::string& name, const std::vector<int64_t>& shape, int64_t first, const Tensor& out,
              Upload* upload = nullptr) const;
    // The same of a matrix [rows,columns] that the file has as [columns,rows]; some of its columns, and whole rows of these.
    void read_transposed(const std::string& name, const std::vector<int64_t>& shape, const Columns& columns,
                         int64_t first, const Tensor& out, Upload& upload) const;

    std::map<std::string, std::string> metadata;

  private:
    void parse_header(std::string_view header, int64_t data_bytes);

    InputFile file;
    std::vector<Entry> table;
    std::unordered_map<std::string, size_t> index;
};

struct NamedTensor {
    std::string name;
    Tensor tensor;            // host or device memory, contiguous
    bool transposed = false;  // the file gets the transposed of the matrix
};

// Writes a header for tensors of these names, types and shapes, then the data of one after another. file.finish() is the
// caller's.
struct SafetensorsWriter {
    SafetensorsWriter(FileWriter& file, const std::vector<NamedTensor>& tensors,
                      const std::map<std::string, std::string>& metadata = {{"format", "pt"}});
    // The next tensor's.
    void write(const NamedTensor& next);
    // data: its elements, in host memory.
    void write(const NamedTensor& next, const void* data);

  private:
    FileWriter& file;
};

// The name of a file in a directory that has weights, in a format that can be read or not, the readable one first; ""
// where there is none.
std::string find_weights(const std::string& directory);

// The weights of a Hugging Face directory: model.safetensors, else the shards that
// model.safetensors.index.json lists. In those of a model that was saved without its head, names lack "model.",
// "transformer." or "bert.": they are found with it, too. Throws Error, also where other files have the weights.
struct WeightFiles {
    explicit WeightFiles(const std::string& directory);

    // Null where there is none of that name.
    const SafetensorsFile::Entry* find(const std::string& name) const;
    // A line that names the others; "" where there are none.
    std::string unused(const std::set<std::string>& used) const;
    // As SafetensorsFile has them.
    void read(const std::string& name, const std::vector<int64_t>& shape, int64_t first, const Tensor& out,
              Upload* upload = nullptr) const;
    void read_transposed(const std::string& name, const std::vector<int64_t>& shape, const Columns& columns,
                         int64_t first, const Tensor& out, Upload& upload) const;

    std::string directory;
    std::vector<SafetensorsFile> files;

  private:
    std::map<std::string, size_t>::const_iterator place_of(const std::string& name) const;
    // The name in its file. Throws Error where there is none.
    std::pair<const SafetensorsFile&, const std::string&> found(const std::string& name) const;

    std::map<std::string, size_t> file_of;  // tensor name there -> index into files
};

}  // namespace llamac
