// Files of a model that training does not change, in addition to its weights: those of a tokenizer, and the settings
// for generation. Checkpoints contain copies, so that transformers opens them as complete models.
#pragma once
#include <string>
#include <vector>

namespace llamac {

struct TokenizerFile {
    std::string name, role, text;  // role: in the manifest, tokenizer or generation
};

// Those of the model's directory; where that has no tokenizer, or is none, the tokenizer's that lies beside the rank
// file ("": there is none). A generation_config.json beside the rank file precedes the model's: packed conversations have
// their own. They are read whole: the directory may be a checkpoint that the run removes.
std::vector<TokenizerFile> read_tokenizer_files(const std::string& model, const std::string& rank_file);

// The file's text, in place of another one's with the name; Error for a name that is none of those.
void replace_tokenizer_file(std::vector<TokenizerFile>& files, const std::string& name, const std::string& text);

}  // namespace llamac
