// manifest.json of a checkpoint: a description of the run, and the size and hash of each file.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/library_gemm.h"
#include "run/options.h"

namespace llamac {

// A file of the checkpoint. Later versions add roles: a file with a role that this version does not know is verified
// and left alone.
struct FileRecord {
    std::string name;  // in the checkpoint's directory
    int64_t bytes = 0;
    uint64_t xxh3 = 0;            // XXH3_64
    std::string role;             // config, weights, index, optimizer, tokenizer, generation
    std::optional<int64_t> rank;  // the one that wrote it; none: it holds all ranks' part
};

struct Manifest {
    int64_t step = 0;           // steps done
    int64_t data_position = 0;  // sequences drawn or left out since the start, over all devices
    int64_t seed = 0, world_size = 1;
    int64_t seq_len = 0, batch_size = 0;
    int64_t sequences = 0;         // of the training data; 0: it had none of its own
    int64_t total_batch_size = 0;  // tokens per step, never 0
    std::string dtype, grad_dtype, optimizer_state, master_weights;  // as the flags have them
    std::map<std::string, std::string> kernels;                      // operation -> variant
    GemmChoices gemms;                                               // algorithms of the matrix products
    nlohmann::json config;                                           // the resolved options
    std::vector<FileRecord> files;                                   // by write_checkpoint
};

inline int64_t sequences_per_step(const Manifest& m) {
    return m.total_batch_size / m.seq_len;
}

// The manifest of a run after `step` steps; sequences, kernels, gemms and files stay empty.
Manifest describe_run(const Options& options, int64_t world_size, int64_t step);

// Records as text, for another rank that puts them into the manifest.
std::string records_text(const std::vector<FileRecord>& records);
std::vector<FileRecord> parse_records(const std::string& text);

// Format 2.
std::string manifest_text(const Manifest& manifest);
// Whether the text has a manifest's checksum at its end, and it is right: nothing was changed or cut short.
bool is_whole_manifest(const std::string& text);
// Reads format 2, and format 1 of version 0.1, whose files are an object: three names, to bytes and hash. Throws Error,
// which `where` begins, for whatever manifest_text does not write, but for roles that it does not know.
Manifest parse_manifest(const std::string& text, const std::string& where);

}  // namespace llamac
