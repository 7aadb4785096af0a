#include "train/batch_queue.h"

#include <algorithm>

#include "core/device_memory.h"

namespace llamac {

BatchQueue::BatchQueue(Model& of, int64_t steps, int64_t micro_batches, const DocumentMarks& tokenizer_marks)
    : model(of),
      micro_ids(of.options.batch_size * of.options.seq_len),
      step_ids(micro_ids * micro_batches),
      predicted_ids(of.options.predicted_rows ? 2 * of.options.predicted_rows + micro_ids : 0),
      marks(tokenizer_marks) {
    for (int64_t step = 0; step < steps; step++) {
        StepTokens& s = queue.emplace_back();
        std::vector<Tensor*> all = {&s.tokens, &s.targets};
        if (model.options.document_mask) all.push_back(&s.first);
        if (model.options.document_mask && !model.config.causal) all.push_back(&s.end);
        for (Tensor* t : all) model.arena.plan("tokens", t, shaped(DType::i32, {step_ids}));
        if (predicted_ids)
            model.arena.plan("tokens", &s.predicted, shaped(DType::i32, {predicted_ids * micro_batches}));
    }
}

void BatchQueue::allocate() {
    const bool masks = model.options.document_mask, ends = masks && !model.config.causal;
    const int64_t micro_batches = step_ids / micro_ids;
    for (StepTokens& s : queue) {
        s.is_predicted.resize(static_cast<size_t>(micro_batches));
        s.host.emplace((2 + masks + ends) * step_ids + predicted_ids * micro_batches);
    }
}

HostBatch BatchQueue::host(int64_t step, int64_t micro) const {
    int32_t* const tokens = queue[static_cast<size_t>(step) % queue.size()].host->data + micro * micro_ids;
    int32_t* const first = model.options.document_mask ? tokens + 2 * step_ids : nullptr;
    int32_t* const end = first && !model.config.causal ? first + step_ids : nullptr;
    int32_t* const behind = tokens - micro * micro_ids + (2 + !!first + !!end) * step_ids;
    return {tokens, tokens + step_ids, first, end, predicted_ids ? behind + micro * predicted_ids : nullptr};
}

void BatchQueue::find_documents(const HostBatch& batch, int64_t rows, int64_t T) const {
    if (batch.first) llamac::find_documents(batch.tokens, rows, T, marks, batch.first);
}

void BatchQueue::find_ends(const HostBatch& batch, int64_t rows, int64_t T) const {
    if (batch.end) llamac::find_ends(batch.first, rows, T, batch.end);
}

int64_t BatchQueue::counted_targets(int64_t step) const {
    const int32_t* const targets = host(step).targets;
    return step_ids - std::count(targets, targets + step_ids, ignore_index);
}

void BatchQueue::copy(int64_t step, int64_t micro) {
    StepTokens& s = of(step);
    const HostBatch from = host(step, micro);
    find_ends(from, model.options.batch_size, model.options.seq_len);
    Context copying = model.context;
    copying.stream = copies.handle;
    const auto copy_ahead = [&](const int32_t* ids, const Tensor& to) {
        if (ids)
            copy_bytes_async(copying, static_cast<int32_t*>(to.data) + micro * micro_ids, ids,
                             micro_ids * size_of(to.dtype));
    };
    copy_ahead(from.tokens, s.tokens);
    copy_ahead(from.targets, s.targets);
    copy_ahead(from.first, s.first);
    copy_ahead(from.end, s.end);
    if (predicted_ids) {
        s.is_predicted[micro] =
            find_predicted(from.targets, micro_ids, model.options.predicted_rows, from.predicted);
        copy_bytes_async(copying, static_cast<int32_t*>(s.predicted.data) + micro * predicted_ids,
                         from.predicted, predicted_ids * size_of(s.predicted.dtype));
    }
    s.copied.record(copies.handle);
    s.copied.wait_event(model.stream.handle);
}

void BatchQueue::use(int64_t step, int64_t micro) {
    const StepTokens& s = of(step);
    const auto ids = [&](const Tensor& all) {
        return all.data ? static_cast<const int32_t*>(all.data) + micro * micro_ids : nullptr;
    };
    set_batch(model, ids(s.tokens), ids(s.targets), model.options.batch_size, model.options.seq_len,
              ids(s.first), ids(s.end));
    if (s.is_predicted[micro])
        set_predicted(model, static_cast<const int32_t*>(s.predicted.data) + micro * predicted_ids);
}

}  // namespace llamac
