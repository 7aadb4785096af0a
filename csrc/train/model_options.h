// The flags that the model is made by.
#pragma once
#include "model/model.h"
#include "train/options.h"

namespace llamac {

ModelOptions model_options(const Options& options);

}  // namespace llamac
