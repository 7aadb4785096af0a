// The files of a tokenizer and the settings for generation. Checkpoints contain copies, so that transformers opens them as
// complete models.
#pragma once
#include <string>
#include <vector>

namespace llamac {

struct TokenizerFile {
    std::string name, role, text;  // role: in the manifest, tokenizer or generation
};

// Reads those of the model's directory or, if that has no tokenizer, of the folder of the data ("": none). packed: the data are
// conversations; `llamac finetune` wrote the files beside them, which precede the model's, name by name.
std::vector<TokenizerFile> read_tokenizer_files(const std::string& model, const std::string& data_folder,
                                                bool packed);

// Whether `llamac chat` has a template for conversations.
bool has_chat_template(const std::vector<TokenizerFile>& files);

}  // namespace llamac
