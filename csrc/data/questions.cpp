#include "data/questions.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "core/file.h"
#include "core/json.h"
#include "core/words.h"
#include "platform/error.h"

namespace llamac {
namespace {

constexpr uint32_t questions_magic = 20261125, questions_version = 1, with_lengths = 1;
constexpr size_t questions_words = 16, questions_bytes = 4 * questions_words;

// The 32-bit words of a file, little-endian, as every machine that this runs on.
struct WordReader {
    std::string_view content;
    size_t next = 0;

    uint32_t operator()() {
        uint32_t word = 0;
        std::memcpy(&word, content.data() + 4 * next++, sizeof word);
        return word;
    }
    uint64_t pair() {
        const uint64_t low = (*this)();
        return low | uint64_t{(*this)()} << 32;
    }
};

// The counts in the header.
struct Counts {
    uint32_t questions, choices, ids;
};

Counts read_questions_header(Questions& q, std::string_view content) {
    const std::string& path = q.path;
    if (content.size() < questions_bytes)
        fail(path, ": header: expected ", questions_bytes, " bytes, found ", content.size());
    WordReader word{content};
    const uint32_t magic = word(), version = word();
    if (magic != questions_magic || version != questions_version)
        fail(path, ": header: expected magic ", questions_magic, " version ", questions_version, ", found ",
             magic, " version ", version);
    q.vocab_size = word();
    if (q.vocab_size < 1 || q.vocab_size > INT32_MAX)
        fail(path, ": header: expected a vocabulary of 1 to ", INT32_MAX, " ids, found ", q.vocab_size);
    const Counts n{word(), word(), word()};
    if (n.questions < 1) fail(path, ": header: expected questions, found none");
    q.tokenizer_hash = word.pair();
    q.checksum = word.pair();
    const uint32_t flags = word();
    if (flags > with_lengths)
        fail(path, ": header word 10: expected flags up to ", with_lengths, ", found ", flags);
    q.has_lengths = flags == with_lengths;
    while (word.next < questions_words)
        if (const uint32_t found = word(); found != 0)
            fail(path, ": header word ", word.next - 1, ": expected 0, found ", found);
    const uint64_t size =
        questions_bytes + 8 * uint64_t{n.questions} + 12 * uint64_t{n.choices} + 4 * uint64_t{n.ids};
    if (content.size() != size) fail(path, ": size: expected ", size, " bytes, found ", content.size());
    return n;
}

std::string task_of(const std::string& path) {
    const std::string name = path.substr(path.find_last_of('/') + 1);
    return name.substr(0, name.rfind('.'));
}

}  // namespace

Questions parse_questions(std::string_view content, const std::string& path) {
    Questions q;
    q.path = path;
    q.task = task_of(path);
    const Counts n = read_questions_header(q, content);
    const std::string_view payload = content.substr(questions_bytes);
    if (const uint64_t computed = XXH3_64bits(payload.data(), payload.size()); q.checksum != computed)
        fail(path, ": checksum: expected ", hex(q.checksum), ", found ", hex(computed), ": it is damaged");
    WordReader word{payload};
    int64_t choices = 0, ids = 0;
    q.questions.reserve(n.questions);
    for (uint32_t i = 0; i < n.questions; i++) {
        const int64_t count = word(), right = word();
        if (right >= count || count > int64_t{n.choices} - choices)
            fail(path, ": question ", i, ": expected a right choice among its own, of ",
                 int64_t{n.choices} - choices, " that are left, found ", right, " of ", count);
        q.questions.push_back({choices, count, right});
        choices += count;
    }
    if (choices != n.choices)
        fail(path, ": expected ", n.choices, " choices in all questions, found ", choices);
    q.choices.reserve(n.choices);
    for (uint32_t i = 0; i < n.choices; i++) {
        const int64_t context = word(), continuation = word(), length = word();
        const int64_t left = int64_t{n.ids} - ids;
        if (context < 1 || continuation < 1 || context + continuation > left)
            fail(path, ": choice ", i, ": expected a context and a continuation of 1 to ", left,
                 " ids together, found ", context, " and ", continuation);
        if ((length > 0) != q.has_lengths)
            fail(path, ": choice ", i, ": expected ", q.has_lengths ? "a length from 1 on" : "no length",
                 ", found ", length);
        q.choices.push_back({ids, context, continuation, length});
        ids += context + continuation;
    }
    if (ids != n.ids) fail(path, ": expected ", n.ids, " ids in all choices, found ", ids);
    q.ids.resize(n.ids);
    std::memcpy(q.ids.data(), payload.data() + 4 * word.next, 4 * size_t{n.ids});
    for (size_t i = 0; i < q.ids.size(); i++)
        if (q.ids[i] < 0 || q.ids[i] >= q.vocab_size)
            fail(path, ": id ", i, ": expected one below the vocabulary's ", q.vocab_size, ", found ",
                 static_cast<uint32_t>(q.ids[i]));
    return q;
}

std::vector<Questions> read_questions(const std::string& list) {
    std::vector<Questions> found;
    for (const std::string& path : split_list(list)) {
        if (path.empty()) fail("--eval-tasks: expected files separated by commas, found ", quote(list));
        Questions questions = parse_questions(read_file(path), path);
        for (const Questions& other : found)
            if (other.task == questions.task)
                fail("--eval-tasks: expected files of different names, found ", other.path, " and ", path);
        found.push_back(std::move(questions));
    }
    return found;
}

}  // namespace llamac
