#include "train/score.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>

#include "core/device_memory.h"
#include "core/file.h"
#include "platform/ranges.h"

namespace llamac {
namespace {

// Ids that the model reads of a choice, the last `counted` of which have targets.
struct ChoiceRow {
    const int32_t* ids;
    int64_t length, counted;
};

ChoiceRow row_of(const Questions& q, const Choice& choice, int64_t longest) {
    const int64_t ids = std::min(choice.context + choice.continuation, longest + 1), length = ids - 1;
    const int64_t end = choice.first + choice.context + choice.continuation;
    return {q.ids.data() + (end - ids), length, std::min(choice.continuation, length)};
}

// Choices that are read in one pass, the first of which is the longest.
using ChoiceBatch = std::span<const int64_t>;

struct Passes {
    const Axis context;           // of the mesh
    std::vector<ChoiceRow> rows;  // of all choices
    std::vector<int64_t> order;   // of choices, the longest first
    std::vector<ChoiceBatch> batches;

    Passes(const Questions& q, const ModelOptions& o) : context(o.context), order(q.choices.size()) {
        const int64_t T = o.seq_len;
        for (const Choice& choice : q.choices) rows.push_back(row_of(q, choice, T));
        std::iota(order.begin(), order.end(), int64_t{0});
        std::stable_sort(order.begin(), order.end(),
                         [&](int64_t a, int64_t b) { return row(a).length > row(b).length; });
        for (size_t at = 0; at < order.size();) {
            const auto fit = static_cast<size_t>(o.batch_size * T / length(order[at]));
            batches.push_back(ChoiceBatch(order).subspan(at, std::min(fit, order.size() - at)));
            at += batches.back().size();
        }
    }
    const ChoiceRow& row(int64_t choice) const { return rows[choice]; }
    // Of the sequences of a pass that begins with this choice.
    int64_t length(int64_t choice) const { return divisible_length(context, row(choice).length); }
};

// Inputs and results of a pass, in host memory.
struct PassBuffers {
    std::vector<int32_t> tokens, targets;
    std::vector<float> losses;  // of this rank's tokens
};

void read_batch(Model& model, const Passes& passes, ChoiceBatch batch, PassBuffers& b) {
    const int64_t T = passes.length(batch[0]);
    const size_t size = batch.size() * static_cast<size_t>(T);
    b.tokens.assign(size, 0);
    b.targets.assign(size, ignore_index);
    b.losses.resize(size / static_cast<size_t>(passes.context.ranks));
    for (size_t i = 0; i < batch.size(); i++) {
        const ChoiceRow& row = passes.row(batch[i]);
        const int64_t begin = static_cast<int64_t>(i) * T, before = row.length - row.counted;
        std::copy_n(row.ids, row.length, b.tokens.begin() + begin);
        std::copy_n(row.ids + before + 1, row.counted, b.targets.begin() + begin + before);
    }
    set_batch(model, b.tokens.data(), b.targets.data(), static_cast<int64_t>(batch.size()), T);
    forward(model);
    if (model.parameters.holds_head())
        copy_bytes(b.losses.data(), model.activations.losses.data, model.activations.losses.bytes());
}

}  // namespace

std::string checksums(const std::vector<Questions>& all) {
    std::string text;
    for (const Questions& each : all) text += (text.empty() ? "" : ", ") + hex(each.checksum);
    return text.empty() ? "none" : text;
}

std::vector<double> likelihoods(Model& model, const Questions& questions, const Ranks& ranks,
                                const Mesh& mesh, const std::function<void()>& between) {
    const Range range("evaluation");
    const Passes passes(questions, model.options);
    std::vector<double> own(questions.choices.size(), 0.0);
    PassBuffers buffers;
    // Weights are gathered by all ranks together: where the passes do not divide, some compute the last one for nothing.
    const auto count = static_cast<int64_t>(passes.batches.size());
    for (int64_t first = 0; first < count; first += mesh.data.ranks) {
        const int64_t number = first + mesh.data.rank;
        const ChoiceBatch batch = passes.batches[std::min(number, count - 1)];
        read_batch(model, passes, batch, buffers);
        const Pieces pieces{mesh.context, passes.length(batch[0])};
        const int64_t own_len = pieces.T / mesh.context.ranks;
        for (size_t i = 0; number < count && i < batch.size(); i++) {
            const ChoiceRow& row = passes.row(batch[i]);
            const auto begin = buffers.losses.begin() + static_cast<int64_t>(i) * own_len;
            double& log = own[batch[i]];
            for (int64_t t = row.length - row.counted; t < row.length; t++)
                if (const auto [rank, place] = pieces.place(t); rank == mesh.context.rank)
                    log -= double{begin[place]};
        }
        if (between) between();
    }
    if (ranks.count == 1) return own;
    const std::string bytes(reinterpret_cast<const char*>(own.data()), own.size() * sizeof(double));
    std::vector<double> all(own.size(), 0.0);
    const std::vector<std::string> texts = ranks.gather("likelihoods", bytes);
    for (int64_t data = 0; data < mesh.data.ranks; data++)
        for (int64_t context = 0; context < mesh.context.ranks; context++) {
            const std::string& text = texts[mesh.rank_of(0, context, data)];
            std::memcpy(own.data(), text.data(), text.size());
            for (size_t i = 0; i < all.size(); i++) all[i] += own[i];
        }
    return all;
}

Score score(const Questions& q, const std::vector<double>& logs) {
    int64_t right = 0, right_norm = 0;
    std::vector<double> values, normed;
    for (const Question& question : q.questions) {
        values.clear(), normed.clear();
        for (int64_t i = question.first; i < question.first + question.count; i++) {
            values.push_back(logs[i]);
            normed.push_back(values.back() / static_cast<double>(q.choices[i].length));
        }
        const auto is_right = [&](const std::vector<double>& of) {  // of equals, the first
            return std::max_element(of.begin(), of.end()) - of.begin() == question.right;
        };
        right += is_right(values);
        right_norm += q.has_lengths && is_right(normed);
    }
    const auto n = static_cast<double>(q.questions.size());
    Score found{q.task, static_cast<int64_t>(q.questions.size()), static_cast<double>(right) / n, {}};
    if (q.has_lengths) found.accuracy_norm = static_cast<double>(right_norm) / n;
    return found;
}

}  // namespace llamac
