// Writes a file of tensors at once.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "core/folder.h"
#include "core/safetensors.h"

namespace llamac {

inline void write_safetensors(FileWriter& file, const std::vector<NamedTensor>& tensors,
                              const std::map<std::string, std::string>& metadata = {{"format", "pt"}}) {
    SafetensorsWriter writer(file, tensors, metadata);
    for (const NamedTensor& t : tensors) writer.write(t);
}
// Returns the file's XXH3_64.
inline uint64_t write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                                  const std::map<std::string, std::string>& metadata = {{"format", "pt"}}) {
    const OpenFolder parent(parent_of(path));
    FileWriter file(parent, name_of(path));
    write_safetensors(file, tensors, metadata);
    return file.finish();
}

}  // namespace llamac
