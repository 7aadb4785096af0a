#include "run/model_options.h"

#include <algorithm>

namespace llamac {

bool replays_graphs(const std::string& graphs, bool by_default) {
    return graphs == "on" || (graphs == "auto" && by_default);
}

ModelOptions model_options(const Options& o, int64_t rank, int64_t ranks) {
    ModelOptions m;
    m.batch_size = o.batch_size;
    m.seq_len = o.seq_len;
    m.precision = {float_dtype(o.dtype), float_dtype(o.grad_dtype), float_dtype(o.optimizer_state),
                   o.master_weights == "on"};
    m.recompute = parse_recompute(o.recompute);
    m.kernels = o.kernel;
    // Of a sample. In fp8 it would have other scales than the whole sequence.
    if (o.sample_every > 0 && o.matmul_dtype != "fp8") {
        const auto prompt = std::max<int64_t>(1, std::ssize(parse_prompt_ids(o.sample_prompt_ids)));
        m.cache = {1, std::min(o.seq_len, prompt + o.sample_tokens - 1)};
    }
    m.graphs = replays_graphs(o.graphs);
    m.skip_nonfinite = o.skip_nonfinite > 0;
    m.document_mask = o.document_mask == "on";
    m.sharding = {rank, ranks, o.zero, shard_group(o, ranks)};
    if (o.matmul_dtype == "fp8") {
        const bool fnuz = device_properties().fp8 == Fp8Units::fnuz;
        m.fp8.emplace();
        m.fp8->scaling = o.fp8_recipe == "tensor" ? Fp8Scaling::current
                         : o.fp8_recipe == "row"  ? Fp8Scaling::row
                                                  : Fp8Scaling::delayed;
        m.fp8->weights = o.fp8_weights == "stored" ? Fp8Weights::stored : Fp8Weights::recomputed;
        m.fp8->values = fnuz ? DType::e4m3fnuz : DType::e4m3;
        m.fp8->gradients = o.fp8_gradients == "e4m3" ? m.fp8->values : fnuz ? DType::e5m2fnuz : DType::e5m2;
        m.fp8->head = o.fp8_head == "on";
        m.fp8->keep_first = o.fp8_keep_first, m.fp8->keep_last = o.fp8_keep_last;
    }
    if (o.reduce_dtype != "auto") m.sharding.sums = float_dtype(o.reduce_dtype);
    return m;
}

}  // namespace llamac
