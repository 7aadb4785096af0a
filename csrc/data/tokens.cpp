#include "data/tokens.h"

#include <glob.h>

#include <algorithm>
#include <cstring>

#include "core/random.h"
#include "model/config.h"
#include "platform/error.h"

namespace llamac {
namespace {

constexpr int header_words = 256, header_bytes = 4 * header_words;

// Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
uint64_t splitmix64(uint64_t x) {
    uint64_t z = x + 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

// The command that makes such files: the project's texts have names, and folders of their own.
std::string how_to_make(const std::string& pattern) {
    const size_t slash = pattern.find_last_of('/');
    const std::string folder = slash == pattern.npos ? "." : pattern.substr(0, slash);
    for (const char* name : {"stdlib", "tinyshakespeare"})
        if (folder == std::string("data/") + name) return std::string("python -m llamac data ") + name;
    return "python -m llamac data TEXT --tokenizer FILE --out " + folder;
}

std::vector<std::string> matching_paths(const std::string& pattern) {
    glob_t found{};
    // Sorted below, by bytes: glob's own order depends on the locale. NOESCAPE as in Python's glob.
    const int rc = glob(pattern.c_str(), GLOB_NOSORT | GLOB_NOESCAPE, nullptr, &found);
    std::vector<std::string> paths;
    if (rc == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    std::sort(paths.begin(), paths.end());
    return paths;
}

constexpr uint32_t marks = no_target | begins_document;

template <class Word>
void read_tokens(const TokenShard& shard, int64_t first, int64_t n, int64_t vocab_size, uint32_t* out) {
    constexpr int64_t bytes = sizeof(Word);
    std::vector<Word> words(static_cast<size_t>(n));
    shard.file.read(header_bytes + first * bytes, words.data(), n * bytes);
    for (int64_t i = 0; i < n; i++) {
        out[i] = words[i];
        const uint32_t id = shard.packed ? out[i] & ~marks : out[i];
        if (id >= vocab_size)
            fail(shard.file.path, ": token ", first + i, ": expected an id below ", vocab_size, ", found ",
                 id);
    }
}

}  // namespace

void find_documents(const int32_t* tokens, int64_t rows, int64_t T, const DocumentMarks& marks,
                    int32_t* first) {
    for (int64_t row = 0; row < rows; row++, tokens += T, first += T)
        for (int64_t t = 0, begin = 0; t < T; t++) {
            if (tokens[t] == marks.begin || (t > 0 && tokens[t - 1] == marks.end)) begin = t;
            first[t] = static_cast<int32_t>(begin);
        }
}

void find_ends(const int32_t* first, int64_t rows, int64_t T, int32_t* end) {
    for (int64_t at = rows * T - 1; at >= 0; at--) {
        const bool is_last = at % T == T - 1 || first[at + 1] != first[at];
        end[at] = is_last ? static_cast<int32_t>(at % T + 1) : end[at + 1];
    }
}

bool find_predicted(const int32_t* targets, int64_t N, int64_t M, int32_t* ids) {
    std::fill(ids, ids + M, 0);
    std::fill(ids + M, ids + 2 * M, ignore_index);
    int64_t count = 0;
    for (int64_t row = 0; row < N; row++) {
        const bool counts = targets[row] != ignore_index;
        ids[2 * M + row] = static_cast<int32_t>(counts ? count : M - 1);
        if (!counts) continue;
        if (count == M - 1) return false;
        ids[count] = static_cast<int32_t>(row), ids[M + count] = targets[row];
        count++;
    }
    return true;
}

TokenShard::TokenShard(const std::string& path) : file(path) {
    if (file.size < header_bytes)
        fail(path, ": header: expected ", header_bytes, " bytes, found ", file.size);
    uint32_t header[header_words];
    file.read(0, header, header_bytes);
    const bool narrow = header[0] == 20240520 && header[1] == 1,
               wide = header[0] == 20240801 && header[1] == 7;
    if (!narrow && !wide)
        fail(path, ": header: expected magic 20240520 version 1 or 20240801 version 7, found ", header[0],
             " version ", header[1]);
    width = narrow ? 2 : 4;
    const uint64_t n = header[2] | uint64_t{header[5]} << 32;
    const int64_t payload = file.size - header_bytes;
    if (payload % width != 0 || n != static_cast<uint64_t>(payload / width))
        fail(path, ": size: expected ", header_bytes, " + ", n, " tokens of ", width,
             " bytes as in the header, found ", file.size, " bytes");
    for (int word = 4; word < header_words; word++)
        if (header[word] != 0 && ((word == 4 && narrow) || word > 7))
            fail(path, ": header word ", word, ": expected 0, found ", header[word]);
    count = static_cast<int64_t>(n);
    packed = header[4];
    vocab_size = header[3];
    tokenizer_hash = header[6] | uint64_t{header[7]} << 32;
}

void TokenShard::read(int64_t first, int64_t n, int64_t vocabulary, uint32_t* out) const {
    CHECK(first >= 0 && n >= 0 && first <= count - n);
    if (width == 2) read_tokens<uint16_t>(*this, first, n, vocabulary, out);
    if (width == 4) read_tokens<uint32_t>(*this, first, n, vocabulary, out);
}

uint64_t permute(uint64_t index, uint64_t size, uint64_t seed, uint64_t epoch) {
    CHECK(index < size);
    constexpr int rounds = 6;
    uint64_t key[rounds];
    const uint64_t base = splitmix64(seed ^ splitmix64(epoch));
    for (int i = 0; i < rounds; i++) key[i] = splitmix64(base + static_cast<uint64_t>(i));
    int half = 1;
    while (half < 32 && uint64_t{1} << 2 * half < size) half++;
    const uint64_t mask = (uint64_t{1} << half) - 1;
    uint64_t x = index;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (int i = 0; i < rounds; i++) {
            const uint64_t mixed = left ^ (splitmix64(right ^ key[i]) & mask);
            left = right;
            right = mixed;
        }
        x = left << half | right;
    } while (x >= size);
    return x;
}

void Masking::apply(int64_t place, int64_t T, int32_t* tokens, int32_t* targets) const {
    bool in_word = false, is_chosen = false;
    for (int64_t t = 0; t < T; t++) {
        const Philox random = random_block(seed, 0, masking_stream, place * T + t);
        const auto id = static_cast<size_t>(tokens[t]);
        if (!in_word || !continues[id]) is_chosen = uniform(random.bits[0]) < probability;
        in_word = !continues.empty() && !special[id];
        if (!is_chosen || targets[t] == ignore_index || special[id]) {
            targets[t] = ignore_index;
            continue;
        }
        const double kind = uniform(random.bits[1]);
        const auto drawn = static_cast<int32_t>(uint64_t{random.bits[2]} * special.size() >> 32);
        if (kind < 0.8)
            tokens[t] = token;
        else if (kind < 0.9 && !special[static_cast<size_t>(drawn)])
            tokens[t] = drawn;
    }
}

bool has_files(const std::string& pattern) {
    return !matching_paths(pattern).empty();
}

Loader::Loader(const std::string& files, int64_t length, int64_t vocabulary, int64_t batch,
               int64_t micro_batches, uint64_t random_seed)
    : pattern(files),
      seq_len(length),
      vocab_size(vocabulary),
      batch_size(batch),
      accumulation(micro_batches),
      seed(random_seed) {
    CHECK(seq_len > 0 && vocab_size > 0 && batch_size > 0 && accumulation > 0);
    const std::vector<std::string> paths = matching_paths(pattern);
    if (paths.empty()) fail(pattern, ": no such file; `", how_to_make(pattern), "` makes token files there");
    for (const std::string& path : paths) {
        const TokenShard& shard = shards.emplace_back(path);
        if (shard.vocab_size > vocab_size)
            fail(path, ": vocabulary size: expected at most the model's ", vocab_size, ", found ",
                 shard.vocab_size);
        is_packed = shards[0].packed != 0;
        if (shard.packed != (is_packed ? seq_len : 0))
            fail(path, ": header word 4: expected ",
                 is_packed ? "sequences packed for --seq-len " + std::to_string(seq_len)
                           : "plain tokens as in " + shards[0].file.path,
                 ", found ", shard.packed ? std::to_string(shard.packed) : "plain tokens");
        tokens += shard.count;
        sequences += shard.count > 0 ? (shard.count - 1) / seq_len : 0;
        ends.push_back(sequences);
    }
    if (sequences == 0)
        fail(pattern, ": expected at least seq-len + 1 = ", seq_len + 1, " tokens in a file, found ", tokens,
             " in ", shards.size(), shards.size() == 1 ? " file" : " files");
}

void Loader::read_sequence(int64_t sequence, int64_t place, int64_t row, int32_t* inputs, int32_t* targets,
                           int32_t* first) const {
    const auto end = std::upper_bound(ends.begin(), ends.end(), sequence);
    const int64_t before = end == ends.begin() ? 0 : end[-1], start = (sequence - before) * seq_len;
    const TokenShard& shard = shards[end - ends.begin()];
    std::vector<uint32_t> words(static_cast<size_t>(seq_len) + 1);
    shard.read(start, seq_len + 1, vocab_size, words.data());
    const uint32_t id_bits = is_packed ? ~marks : ~uint32_t{0};
    int64_t begin = 0;
    for (int64_t t = 0, at = row * seq_len; t < seq_len; t++, at++) {
        const uint32_t word = words[t], target = masking ? word : words[t + 1];
        const bool counts = !is_packed || !(target & no_target);
        inputs[at] = static_cast<int32_t>(word & id_bits);
        targets[at] = counts ? static_cast<int32_t>(target & id_bits) : ignore_index;
        if (!is_packed || !first) continue;
        if (word & begins_document) begin = t;
        first[at] = static_cast<int32_t>(begin);
    }
    if (masking) masking->apply(place, seq_len, inputs + row * seq_len, targets + row * seq_len);
}

void Loader::micro_batch(int64_t step, int64_t micro, int64_t rank, int64_t world, int32_t* inputs,
                         int32_t* targets, int64_t skip, int32_t* first) const {
    const auto size = static_cast<uint64_t>(sequences);
    for (int64_t row = 0; row < batch_size; row++) {
        const int64_t position = ((step * accumulation + micro) * batch_size + row) * world + rank + skip;
        const auto p = static_cast<uint64_t>(position);
        const auto sequence = static_cast<int64_t>(permute(p % size, size, seed, p / size));
        read_sequence(sequence, position, row, inputs, targets, first);
    }
}

int64_t Loader::validation_batches(int64_t max_batches) const {
    const int64_t full = sequences / batch_size;
    if (full == 0)
        fail(pattern, ": validation: expected at least a batch of ", batch_size, " sequences, found ",
             sequences);
    return std::min(max_batches, full);
}

void Loader::validation_batch(int64_t batch, int32_t* inputs, int32_t* targets, int32_t* first) const {
    CHECK(batch >= 0 && batch < sequences / batch_size);
    for (int64_t row = 0; row < batch_size; row++)
        read_sequence(batch * batch_size + row, batch * batch_size + row, row, inputs, targets, first);
}

}  // namespace llamac
