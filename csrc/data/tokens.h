// Written twice on purpose: llamac/data/tokens.py has the same; tests/model/test_agreement.py::test_order_of_the_data.
//
// Token files (llm.c's .bin) and the order in which training visits them.
//
// A .bin is an int32[256] little-endian header, then tokens: uint16 with magic 20240520, version 1; uint32 with magic 20240801,
// version 7. Header words: [0] magic, [1] version, [2] and [5] low and high half of the number of tokens; ours, 0 where unknown:
// [3] vocabulary size, [4], of uint32 tokens only, the length T of sequences that whole documents were packed into, whose tokens
// have marks in the upper two bits, [6] and [7] low and high half of XXH3_64 of the tokenizer's rank file. The rest are 0.
#pragma once
#include <optional>
#include <vector>

#include "core/file.h"

namespace llamac {

// The tokens that begin and end documents; -1: there is none.
struct DocumentMarks {
    int32_t begin = -1, end = -1;
};

// first [rows,T]: the position in its row at which the document of each token begins: at marks.begin, after marks.end, or 0.
void find_documents(const int32_t* tokens, int64_t rows, int64_t T, const DocumentMarks& marks,
                    int32_t* first);

// end [rows,T]: the position behind the document of each token, from what find_documents() finds.
void find_ends(const int32_t* first, int64_t rows, int64_t T, int32_t* end);

// The rows of N whose targets count, for a head that computes M rows: ids [2M+N] has these rows, their targets, and each row's
// place among them. Behind them is padding, rows without target, whose last is the place of all other rows. False: M or more
// count.
bool find_predicted(const int32_t* targets, int64_t N, int64_t M, int32_t* ids);

// Marks of a token in a packed file: ignored as a target; first of a document.
constexpr uint32_t no_target = uint32_t{1} << 31, begins_document = uint32_t{1} << 30;

struct TokenShard {
    InputFile file;
    int64_t count = 0;   // tokens
    int width = 0;       // bytes a token: 2 or 4
    int64_t packed = 0;  // header word 4
    int64_t vocab_size = 0;
    uint64_t tokenizer_hash = 0;

    // Checks the header and the size. Throws Error.
    explicit TokenShard(const std::string& path);
    // Tokens first .. first+n-1, with their marks; Error at an id that is not below vocab_size.
    void read(int64_t first, int64_t n, int64_t vocab_size, uint32_t* out) const;
};

// Which tokens an encoder predicts (Devlin et al., "BERT", 2018): each with a probability; of these, 80% are replaced by
// `token`, 10% by a random one, and 10% stay. Random numbers are of the token's place in the data's order: those of any number
// of ranks, and of a resumed run, are the same.
struct Masking {
    double probability = 0.15;
    int32_t token = -1;
    std::vector<bool> special;  // [V]: tokens that are neither predicted nor drawn
    uint64_t seed = 0;
    // [V]: tokens that are predicted where the token before is, as parts of its word; empty: none.
    std::vector<bool> continues = {};

    // Of the T tokens of sequence `place`; targets: the same tokens, or ignore_index, which also becomes that of others.
    void apply(int64_t place, int64_t T, int32_t* tokens, int32_t* targets) const;
};

// The permuted index of 0 .. size-1 in an epoch, by a Feistel network with cycle walking (Black & Rogaway, "Ciphers with Arbitrary
// Finite Domains", 2002).
uint64_t permute(uint64_t index, uint64_t size, uint64_t seed, uint64_t epoch);

// Whether a file matches the glob.
bool has_files(const std::string& pattern);

// Sequences of T tokens and their targets out of all shards that match a glob, in the order of their paths'
// bytes.
struct Loader {
    std::vector<TokenShard> shards;
    int64_t sequences = 0;  // S, over all shards
    int64_t tokens = 0;     // over all shards
    bool is_packed = false;
    std::optional<Masking> masking = {};  // none: targets are the next tokens

    // B = batch_size sequences of T = seq_len tokens per micro-batch, `accumulation` micro-batches per step.
    // Throws Error if no file matches, one is malformed or has a larger vocabulary, not all are packed for this seq_len or all
    // plain, or there is no sequence.
    Loader(const std::string& pattern, int64_t seq_len, int64_t vocab_size, int64_t batch_size,
           int64_t accumulation = 1, uint64_t seed = 0);

    // Micro-batch `micro` of step `step` on rank `rank` of `world`, all from 0: tokens, targets [B,T]. skip: sequences
    // left out. first [B,T] or null: as find_documents() for packed files; unchanged for others.
    void micro_batch(int64_t step, int64_t micro, int64_t rank, int64_t world, int32_t* tokens,
                     int32_t* targets, int64_t skip = 0, int32_t* first = nullptr) const;

    // Full batches in file order, at most `max_batches`; Error if there is none.
    int64_t validation_batches(int64_t max_batches) const;
    // tokens, targets and first, as above, of batch 0 .. validation_batches-1.
    void validation_batch(int64_t batch, int32_t* tokens, int32_t* targets, int32_t* first = nullptr) const;

  private:
    // Into row `row` of each. place: in the order of the data.
    void read_sequence(int64_t sequence, int64_t place, int64_t row, int32_t* tokens, int32_t* targets,
                       int32_t* first) const;

    std::string pattern;
    int64_t seq_len, vocab_size, batch_size, accumulation;
    uint64_t seed;
    std::vector<int64_t> ends;  // sequences up to and including each shard
};

}  // namespace llamac
