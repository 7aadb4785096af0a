// Files of a model that training does not change, in addition to its weights: those of a tokenizer, and the settings
// for generation. Checkpoints contain copies, so that transformers opens them as complete models.
// llamac/carried_files.py holds the same names (tests/test_program.py compares checkpoints).
#pragma once
#include <string>
#include <vector>

namespace llamac {

struct CarriedFile {
    std::string name, role, text;  // role: in the manifest, tokenizer or generation
};

// Those of the model's directory; where that has no tokenizer, or is none, the tokenizer's that lies beside the rank
// file ("": there is none). They are read whole: the directory may be a checkpoint that the run removes.
std::vector<CarriedFile> read_carried_files(const std::string& model, const std::string& rank_file);

}  // namespace llamac
