// A file of multiple-choice questions in token ids, NAME.questions, as `llamac eval --prepare` writes it. Words of
// 32 bits:
//   16: the header of vocabulary.h with 20261125 first, the size of the vocabulary in place of n, the numbers of
//     questions, choices and ids in place of bos, eos and pad, and 1 in place of Dropped if choices have lengths
//   2 per question: the number of choices; the index of the correct one, from 0
//   3 per choice: the numbers of ids of context and continuation; the length in characters, or 0
//   1 per id: of each choice in turn: context, then continuation
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace llamac {

// A context and the continuation whose likelihood the model computes: ids first .. first+context+continuation.
struct Choice {
    int64_t first, context, continuation;
    int64_t length;  // of the text, for the normalized score; 0: none
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
// The files of a list separated by commas. Error if two have the same task, or one has ids of a larger vocabulary or of another
// tokenizer than `tokenizer_hash` (0: not known).
std::vector<Questions> read_questions(const std::string& list, int64_t vocab_size, uint64_t tokenizer_hash);

}  // namespace llamac
