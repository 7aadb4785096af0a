#include "core/embedded.h"

namespace llamac {

const std::vector<EmbeddedFile>& embedded_files() {
    static const std::vector<EmbeddedFile> files = {
#include "core/embedded_files.inc"
    };
    return files;
}

const EmbeddedFile* find_embedded(std::string_view name) {
    for (const EmbeddedFile& file : embedded_files())
        if (file.name == name) return &file;
    return nullptr;
}

}  // namespace llamac
