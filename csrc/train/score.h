// Multiple-choice questions, answered while a run trains: the model takes the choice whose continuation is most
// likely after its context.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/questions.h"
#include "model/model.h"
#include "run/ranks.h"

namespace llamac {

// The fractions of questions with the right answer.
struct Score {
    std::string task;
    int64_t questions;
    double accuracy;                      // by the likelihood
    std::optional<double> accuracy_norm;  // by its logarithm, divided by the choice's length
};

// Checksums, for comparison between ranks.
std::string checksums(const std::vector<Questions>& all);

// ln of the likelihood of each choice's continuation. A choice longer than the model's seq_len loses the begin of its
// context. Passes hold as many choices as fit, the longest first; every rank calls it, and each data-parallel one takes its
// share of the passes. between: called after each pass.
std::vector<double> likelihoods(Model& model, const Questions& questions, const Ranks& ranks,
                                const Mesh& mesh, const std::function<void()>& between = {});

Score score(const Questions& questions, const std::vector<double>& likelihoods);

}  // namespace llamac
