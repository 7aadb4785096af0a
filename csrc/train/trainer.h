// A training run without its loop: the model, its data, one update, validation, sampling, saving.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/model.h"
#include "train/checkpoint.h"
#include "train/options.h"
#include "train/schedule.h"
#include "train/tokenizer.h"
#include "train/tokens.h"

namespace llamac {

struct UpdateResult {
    double loss;       // mean over the update's tokens
    double grad_norm;  // before clipping
    double lr;
};

struct Trainer {
    // Reads the model, the data and, where it goes on from one, the checkpoint; writes nothing. Throws Error.
    explicit Trainer(const Options& options);

    const Options options;
    const std::string resumed_from;  // a checkpoint, or ""
    const Config config;
    const int64_t accumulation;  // micro-steps an update
    const Loader train;
    std::optional<Loader> val;  // none: --val-data ""
    std::optional<Tokenizer> tokenizer;
    Schedule schedule;
    Model model;
    int64_t step = 0;  // updates done

    // The next update: micro-steps, gradient norm, AdamW.
    UpdateResult update();
    // Mean loss over the validation batches. Only where there is validation data.
    double validate();
    // Text of --sample-tokens tokens that the model writes after an end-of-text token.
    std::string sample();
    // Writes OUT/step_NNNNNN; returns its path.
    std::string save();
    int64_t tokens_per_update() const { return accumulation * options.batch_size * options.seq_len; }

  private:
    std::vector<int32_t> tokens, targets;  // [B,T]
};

}  // namespace llamac
