#include "data/questions.h"

#include <cstring>

#include "core/file.h"
#include "core/json.h"
#include "core/words.h"
#include "data/vocabulary.h"
#include "platform/error.h"

namespace llamac {
namespace {

constexpr uint32_t questions_magic = 20261125, with_lengths = 1;

std::string task_of(const std::string& path) {
    const std::string name = path.substr(path.find_last_of('/') + 1);
    return name.substr(0, name.rfind('.'));
}

}  // namespace

Questions parse_questions(std::string_view content, const std::string& path) {
    const DataHeader header = parse_header(content, path, questions_magic, with_lengths);
    Questions q;
    q.path = path;
    q.task = task_of(path);
    q.vocab_size = header.count;
    q.tokenizer_hash = header.tokenizer_hash;
    q.checksum = header.checksum;
    q.has_lengths = header.kind == with_lengths;
    if (q.vocab_size < 1 || q.vocab_size > INT32_MAX)
        fail(path, ": header: expected a vocabulary of 1 to ", INT32_MAX, " ids, found ", q.vocab_size);
    const auto [questions, all_choices, all_ids] = header.numbers;
    if (questions < 1) fail(path, ": header: expected questions, found none");
    const uint64_t words_behind = 2 * uint64_t{questions} + 3 * uint64_t{all_choices} + all_ids;
    if (const uint64_t size = data_header_bytes + 4 * words_behind; content.size() != size)
        fail(path, ": size: expected ", size, " bytes, found ", content.size());
    check_checksum(content, path, header);
    std::vector<uint32_t> words(words_behind);
    std::memcpy(words.data(), content.data() + data_header_bytes, 4 * words.size());
    auto word = words.cbegin();
    int64_t choices = 0, ids = 0;
    q.questions.reserve(questions);
    for (uint32_t i = 0; i < questions; i++) {
        const int64_t count = *word++, right = *word++, left = all_choices - choices;
        if (right >= count || count > left)
            fail(path, ": question ", i, ": expected a right choice among its own, of ", left,
                 " that are left, found ", right, " of ", count);
        q.questions.push_back({choices, count, right});
        choices += count;
    }
    if (choices != all_choices)
        fail(path, ": expected ", all_choices, " choices in all questions, found ", choices);
    q.choices.reserve(all_choices);
    for (uint32_t i = 0; i < all_choices; i++) {
        const int64_t context = *word++, continuation = *word++, length = *word++, left = all_ids - ids;
        if (context < 1 || continuation < 1 || context + continuation > left)
            fail(path, ": choice ", i, ": expected a context and a continuation of 1 to ", left,
                 " ids together, found ", context, " and ", continuation);
        if ((length > 0) != q.has_lengths)
            fail(path, ": choice ", i, ": expected ", q.has_lengths ? "a length from 1 on" : "no length",
                 ", found ", length);
        q.choices.push_back({ids, context, continuation, length});
        ids += context + continuation;
    }
    if (ids != all_ids) fail(path, ": expected ", all_ids, " ids in all choices, found ", ids);
    for (size_t i = 0; word != words.cend(); i++, word++)
        if (*word >= q.vocab_size)
            fail(path, ": id ", i, ": expected one below the vocabulary's ", q.vocab_size, ", found ", *word);
    q.ids.assign(words.cend() - all_ids, words.cend());
    return q;
}

std::vector<Questions> read_questions(const std::string& list, int64_t vocab_size, uint64_t tokenizer_hash) {
    std::vector<Questions> found;
    for (const std::string& path : split_list(list)) {
        if (path.empty()) fail("--eval-tasks: expected files separated by commas, found ", quote(list));
        Questions q = parse_questions(read_file(path), path);
        for (const Questions& other : found)
            if (other.task == q.task)
                fail("--eval-tasks: expected files of different names, found ", other.path, " and ", path);
        if (q.vocab_size > vocab_size)
            fail(path, ": expected ids of at most the model's vocabulary of ", vocab_size, ", found one of ",
                 q.vocab_size);
        if (tokenizer_hash != 0 && q.tokenizer_hash != tokenizer_hash)
            fail(path, ": expected ids of the training data's tokenizer (XXH3_64 ", hex(tokenizer_hash),
                 "), found ", hex(q.tokenizer_hash), "; `llamac eval --prepare` makes a new one");
        found.push_back(std::move(q));
    }
    return found;
}

}  // namespace llamac
