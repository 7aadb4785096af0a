#include "model/optimizer.h"

#include <cmath>

#include "model/pipeline.h"
#include "model/tensor_parallel.h"
#include "model/zero.h"
#include "ops/operations.h"

namespace llamac {

void set_step(Model& m, const float* lr, const int32_t* step) {
    copy_bytes_async(m.context, m.lr.data, lr, sizeof *lr);
    copy_bytes_async(m.context, m.step.data, step, sizeof *step);
}

OptimizerState optimizer_state(const Parameters& p, const Parameter& parameter, int64_t first,
                               int64_t count) {
    const auto of = [&](const Tensor& buffer) {
        return buffer.data ? p.part(buffer, parameter, first, count) : Tensor{};
    };
    return {of(p.weights), of(p.master), of(p.m), of(p.v)};
}

bool sums_squares_in_backward(const Model& m) {
    return m.ranks && !m.pipeline;
}

void sum_squares(Model& m) {
    const Parameters& p = m.parameters;
    const bool has_copies = m.options.pipeline.ranks > 1 && p.is_tied;
    const auto segments = static_cast<int64_t>(p.segments.size());
    if (p.sharding.group == 1 && p.tensor.ranks == 1 && !has_copies) {
        for (int64_t segment = 0; segment < segments; segment++) wait_for_reduction(m, segment);
        global_norm(m.context, {.squares = m.squares, .x = p.gradients, .accumulate = false});
        return reduce_over_stages(m, m.squares);
    }
    bool first = true;
    for (int64_t segment = segments - 1; segment >= 0; segment--) {  // in the order of the reductions
        wait_for_reduction(m, segment);
        for (const FlatParam& flat : p.segments[segment].flat_params) {
            if (flat.is_copy || (!flat.split && p.tensor.rank > 0)) continue;  // another rank has the same
            global_norm(m.context,
                        {.squares = m.squares, .x = p.own(p.gradients, flat), .accumulate = !first});
            first = false;
        }
    }
    if (p.sharding.group > 1) sum_over_shards(m, m.squares);
    reduce_over_tensor(m, m.squares);
    reduce_over_stages(m, m.squares);
}

namespace {

bool rounds_at_random(const Model& m) {
    const Precision& precision = m.options.precision;
    return is_narrow(precision.moments) || (is_narrow(precision.weights) && !precision.master);
}

// The step of AdamW's bias correction: a step that an overflow skipped is none.
Tensor adamw_step(const Model& m) {
    return m.loss_scale.data
               ? make_tensor(static_cast<int32_t*>(m.loss_scale_counts.data) + 1, DType::i32, {1})
               : m.step;
}

}  // namespace

void update(Model& m, const Parameter& parameter, int64_t first, const OptimizerState& state,
            const AdamW& adamw, uint64_t seed) {
    const Parameters& p = m.parameters;
    const int64_t count = state.m.shape[0];
    const Slice& slice = parameter.slice;
    const Slice::Runs runs = slice.runs(slice.axis.rank);
    // Random numbers are those of the whole tensor.
    const bool one = slice.is_one_run() || !rounds_at_random(m);
    llamac::adamw(m.context, {.weight = state.weight.data ? state.weight : p.transient_weights(count),
                              .master = state.master,
                              .m = state.m,
                              .v = state.v,
                              .grad = p.part(p.gradients, parameter, first, count),
                              .squares = m.squares,
                              .lr = m.lr,
                              .step = adamw_step(m),
                              .guard = m.loss_squares,
                              .scale = m.loss_scale,
                              .beta1 = adamw.beta1,
                              .beta2 = adamw.beta2,
                              .eps = adamw.eps,
                              .weight_decay = parameter.group.decays ? adamw.weight_decay : 0.0,
                              .grad_clip = adamw.grad_clip,
                              .seed = seed,
                              .stream = parameter.rng_stream,
                              .offset = slice.is_one_run() ? runs.in_whole(first) : first,
                              .run = one ? 0 : runs.length,
                              .distance = one ? 0 : runs.distance,
                              .start = one ? 0 : runs.start});
}

namespace {

// A whole parameter, whose new value the next forward pass reads as codes.
void update_and_quantize(Model& m, const Parameter& parameter, const Fp8Codes& codes, const AdamW& adamw,
                         uint64_t seed) {
    const Parameters& p = m.parameters;
    const int64_t K = parameter.shape[0], C = parameter.shape[1];
    const auto matrix = [&](const Tensor& flat) { return flat.data ? reshape(flat, {K, C}) : Tensor{}; };
    const OptimizerState state = optimizer_state(p, parameter, 0, K * C);
    adamw_quantize(m.context, {.out = codes.out,
                               .transposed = codes.transposed,
                               .amax = codes.amax,
                               .saturated = codes.saturated,
                               .weight = matrix(state.weight),
                               .master = matrix(state.master),
                               .m = matrix(state.m),
                               .v = matrix(state.v),
                               .grad = matrix(p.part(p.gradients, parameter, 0, K * C)),
                               .squares = m.squares,
                               .lr = m.lr,
                               .step = m.step,
                               .scale = codes.scale,
                               .guard = m.loss_squares,
                               .beta1 = adamw.beta1,
                               .beta2 = adamw.beta2,
                               .eps = adamw.eps,
                               .weight_decay = parameter.group.decays ? adamw.weight_decay : 0.0,
                               .grad_clip = adamw.grad_clip,
                               .seed = seed,
                               .stream = parameter.rng_stream});
}

// The end of the parameters from `begin` on that one call of AdamW updates: neighbors in a segment, of a group, on a rank that has
// all their states, where no random number is a parameter's own. Gaps between them are 0, and stay 0.
size_t end_of_run(const Model& m, size_t begin) {
    const std::vector<Parameter>& table = m.parameters.table;
    const auto joins = [&](const Parameter& each) {
        return each.group.update == Update::adamw && each.group.decays == table[begin].group.decays &&
               each.segment == table[begin].segment && !updated_codes(m, each);
    };
    size_t end = begin + 1;
    if (m.options.sharding.shares_states() || rounds_at_random(m) || !joins(table[begin])) return end;
    while (end < table.size() && joins(table[end])) end++;
    return end;
}

}  // namespace

void optimizer_step(Model& m, const AdamW& adamw, uint64_t seed) {
    const std::vector<Parameter>& table = m.parameters.table;
    fork_exchanges(m);
    if (!sums_squares_in_backward(m)) sum_squares(m);
    update_fp8_scales(m);
    for (size_t begin = 0, end; begin < table.size(); begin = end) {
        end = end_of_run(m, begin);
        const Parameter &parameter = table[begin], &last = table[end - 1];
        auto [first, count] = m.parameters.held(m.parameters.m, parameter);
        if (end > begin + 1) count = last.offset + last.elements() - parameter.offset;
        switch (parameter.group.update) {
        case Update::none:
            break;
        case Update::adamw:
            if (const std::optional<Fp8Codes> codes = updated_codes(m, parameter))
                update_and_quantize(m, parameter, *codes, adamw, seed);
            else if (count > 0)
                update(m, parameter, first, optimizer_state(m.parameters, parameter, first, count), adamw,
                       seed);
        }
        if (end == table.size() || table[end].segment != parameter.segment)
            exchange_updated_weights(m, parameter.segment);
    }
    constexpr int64_t growth_interval = 2000;
    if (m.loss_scale.data)
        update_loss_scale(m.context, {.scale = m.loss_scale,
                                      .counts = m.loss_scale_counts,
                                      .squares = m.squares,
                                      .guard = m.loss_squares,
                                      .interval = m.options.loss_scale > 0 ? 0 : growth_interval});
    join_exchanges(m);
    finish_fp8_update(m);
}

double grad_norm(double squares, double scale) {
    return static_cast<float>(std::sqrt(squares) / scale);
}

}  // namespace llamac
