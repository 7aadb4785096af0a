// Hugging Face's config.json: a model's shape from it, and the text of one.
#pragma once
#include <string>

#include "model/config.h"

namespace llamac {

// model: a preset's NAME (configs/models/NAME.json), a folder with a config.json, or a .json file.
// Throws Error with the file, the field, the expected and the found value.
Config load_config(const std::string& model);
// The text of a config.json that transformers reads back to the same model.
std::string config_json(const Config& config, DType dtype);

}  // namespace llamac
