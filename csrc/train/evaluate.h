// Reads the weights of a trainer between steps: validation, evaluation, samples. No step may be in flight.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "train/score.h"
#include "train/trainer.h"

namespace llamac {

// Mean loss over the validation batches. Throws Error without validation data.
double validate(Trainer& t);
// Bytes of text per target that counts, over the validation batches; NaN without a tokenizer.
double validation_bytes_per_target(const Trainer& t);
// Mean loss over rows of T tokens, --batch-size rows at a time: fill writes tokens and targets [count,T] of the rows from
// `first` on.
using FillRows = std::function<void(int64_t first, int64_t count, int32_t* tokens, int32_t* targets)>;
double mean_loss_of(Trainer& t, int64_t rows, int64_t T, const FillRows& fill);

// Scores of --eval-tasks, in their order.
std::vector<Score> evaluate(Trainer& t);

// The token that precedes a document: the tokenizer's, or else the model's.
int32_t first_token(const Trainer& t);
// The prompt of samples: --sample-prompt-ids, or else the first token.
std::vector<int32_t> sample_prompt(const Trainer& t);
// Tokens that the model writes after the prompt; the same for the same weights at the same step.
std::vector<int32_t> sample(Trainer& t, std::vector<int32_t> prompt, int64_t count, double temperature,
                            int64_t top_k);
// The text of ids (Tokenizer::decode), or the ids themselves without a tokenizer.
std::string text_of(const Trainer& t, const std::vector<int32_t>& ids);
// The sample that the flags ask for, with --sample-prompt-ids if they are given.
std::string sample_text(Trainer& t);

}  // namespace llamac
