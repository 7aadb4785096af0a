// The files of a tokenizer and the settings for generation. Checkpoints contain copies, so that transformers opens them as
// complete models.
#pragma once
#include <string>
#include <vector>

namespace llamac {

struct TokenizerFile {
    std::string name, role, text;  // role: in the manifest, tokenizer or generation
};

// Reads those of the model's directory or, if that has no tokenizer, those beside the rank file ("": none). A
// generation_config.json beside the rank file, as packed conversations have, precedes the model's.
std::vector<TokenizerFile> read_tokenizer_files(const std::string& model, const std::string& rank_file);

// Replaces the text of a file; throws Error for an unknown name.
void replace_tokenizer_file(std::vector<TokenizerFile>& files, const std::string& name,
                            const std::string& text);

}  // namespace llamac
