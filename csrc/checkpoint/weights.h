// Weights in Hugging Face's files, and the optimizer's state in the files of a checkpoint.
#pragma once
#include <string>
#include <vector>

#include "core/safetensors.h"
#include "model/parameters.h"

namespace llamac {

// load_config() of a directory whose weights are loaded: as in transformers, the model is not tied where they have an LM head
// that is not the embedding, whatever config.json says. `warning` is then a line that says so, else "".
Config load_config_of_weights(const std::string& directory, std::string& warning);
// Weights from Hugging Face's files, converted to the weights' type. Throws Error naming the tensor and the
// file. Returns a line that names tensors of the files that the model has not; "" where it has all.
std::string load_weights(Parameters& p, const std::string& directory);

// What this rank writes of the optimizer into a checkpoint. Each group writes some of the tensors; of these, each rank its
// shard: whole rows, which begin where those of the rank before end. Everything, with one rank.
std::vector<NamedTensor> optimizer_tensors(const Parameters& p);
// Reads the optimizer's state from the files of all ranks that wrote it, in their order; they may have been others than
// there are now. Throws Error naming the tensor and the file.
void load_optimizer(Parameters& p, const std::vector<std::string>& paths);

}  // namespace llamac
