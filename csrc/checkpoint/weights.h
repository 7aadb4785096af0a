// Weights in Hugging Face's files, and the optimizer's state in the files of a checkpoint.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "core/safetensors.h"
#include "model/parameters.h"
#include "run/ranks.h"

namespace llamac {

// load_config() of a directory whose weights are loaded: as in transformers, the model is not tied where they have an LM head
// that is not the embedding, whatever config.json says. `warning` is then a line that says so, else "".
Config load_config_of_weights(const std::string& directory, std::string& warning);
// The ranks that load the same files. They read each tensor once between them: one of the ranks that hold the same part of it
// reads it and sends it to the others.
struct Readers {
    const Ranks& ranks = one_rank;
    Communicator* whole = nullptr;   // those with the same weights; null for one
    Communicator* shards = nullptr;  // those with the same shards; null for one
};

// Weights from Hugging Face's files, converted to the weights' type. master: also the master weights. Every rank calls it, as
// the two below. Throws Error naming the tensor and the file. Returns a line that names tensors of the files that the model
// has not; "" where it has all.
std::string load_weights(Parameters& p, const std::string& directory, const Readers& readers = {},
                         bool master = true);
// The adapters of a checkpoint, in PEFT's file, beside weights that are there.
constexpr const char* adapter_file = "adapter_model.safetensors";
constexpr const char* base_name = "base.hash";  // of the frozen weights, among the optimizer's tensors
void load_adapters(Parameters& p, const std::string& directory, const Readers& readers = {},
                   bool master = true);

// The buffers of the optimizer's state, by the first part of their tensors' names in checkpoints.
std::vector<std::pair<std::string, Tensor>> optimizer_buffers(const Parameters& p);
// The optimizer tensors that this rank writes into a checkpoint, without tensor parallelism. Each group writes some of the
// tensors; each of its ranks writes its shard of them: whole rows that follow those of the rank before. One rank writes
// everything.
std::vector<NamedTensor> optimizer_tensors(const Parameters& p);
// Reads the optimizer's state from the files of all ranks that wrote it, in their order; their number may differ from the
// current one. Throws Error naming the tensor and the file.
void load_optimizer(Parameters& p, const std::vector<std::string>& paths, const Readers& readers);

}  // namespace llamac
