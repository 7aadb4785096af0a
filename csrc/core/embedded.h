// Files of configs/ that are embedded in the program (embedded.cmake), so that it finds them in any location.
#pragma once
#include <string_view>
#include <vector>

namespace llamac {

struct EmbeddedFile {
    std::string_view name;  // within configs/: "tiny.toml", "models/tiny.json", "tables/flags.toml"
    std::string_view text;
};

// By name.
const std::vector<EmbeddedFile>& embedded_files();
// Null where there is no file of this name.
const EmbeddedFile* find_embedded(std::string_view name);

}  // namespace llamac
