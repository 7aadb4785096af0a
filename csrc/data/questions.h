// A file of multiple-choice questions in token ids, NAME.questions, as `llamac eval --prepare` writes it.
// docs/training.md, "The file of questions", has the format.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace llamac {

// A context and the continuation whose likelihood the model computes: ids first .. first+context+continuation.
struct Choice {
    int64_t first, context, continuation;
    int64_t length;  // of the text, for the normalised score; 0: none
};

struct Question {
    int64_t first, count;  // of its choices
    int64_t right;         // index among them
};

struct Questions {
    std::string path, task;  // task: the file's name without its end
    int64_t vocab_size = 0;
    uint64_t tokenizer_hash = 0;  // as the shards record it
    uint64_t checksum = 0;
    bool has_lengths = false;
    std::vector<Question> questions;
    std::vector<Choice> choices;
    std::vector<int32_t> ids;  // [0,vocab_size)
};

// The content of such a file; Error where it is malformed or damaged.
Questions parse_questions(std::string_view content, const std::string& path);
// The files of a list separated by commas. Error if two have the same task.
std::vector<Questions> read_questions(const std::string& list);

}  // namespace llamac
