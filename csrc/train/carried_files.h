// Files that belong to a model beside its weights and that training does not change: a tokenizer's, and how to generate.
// A checkpoint carries them along, so that transformers opens it whole. llamac/carried_files.py holds the same names
// (tests/test_program.py compares checkpoints).
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
