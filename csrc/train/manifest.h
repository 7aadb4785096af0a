// manifest.json of a checkpoint: what the run was, and what each file must be.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "core/gemm.h"
#include "train/options.h"

namespace llamac {

struct FileRecord {
    int64_t bytes = 0;
    uint64_t xxh3 = 0;  // XXH3_64
};

struct Manifest {
    int64_t step = 0;           // updates done
    int64_t data_position = 0;  // sequences drawn since the start, over all devices: follows from the rest
    int64_t seed = 0, world_size = 1;
    int64_t seq_len = 0, batch_size = 0;
    int64_t sequences = 0;         // of the training data; 0: it had none of its own
    int64_t total_batch_size = 0;  // tokens an update, never 0
    std::string dtype, grad_dtype, optimizer_state, master_weights;  // as the flags have them
    std::map<std::string, std::string> kernels;                      // operation -> variant
    GemmChoices gemms;                                               // what computed the matrix products
    nlohmann::json config;                                           // the resolved options
    std::map<std::string, FileRecord> files;                         // by write_checkpoint
};

// The manifest of a run after `step` updates; sequences, kernels, gemms and files stay empty.
Manifest describe_run(const Options& options, int64_t world_size, int64_t step);

std::string manifest_text(const Manifest& manifest);
// Throws Error, which `where` begins, for whatever manifest_text does not write.
Manifest parse_manifest(const std::string& text, const std::string& where);

}  // namespace llamac
