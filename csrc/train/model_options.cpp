#include "train/model_options.h"

namespace llamac {

ModelOptions model_options(const Options& o, int64_t rank, int64_t ranks) {
    ModelOptions m;
    m.batch_size = o.batch_size;
    m.seq_len = o.seq_len;
    m.precision = {float_dtype(o.dtype), float_dtype(o.grad_dtype), float_dtype(o.optimizer_state),
                   o.master_weights == "on"};
    m.recompute = parse_recompute(o.recompute);
    m.kernels = o.kernel;
    m.skip_nonfinite = o.skip_nonfinite > 0;
    m.sharding = {rank, ranks, o.zero, shard_group(o, ranks)};
    if (o.reduce_dtype != "auto") m.sharding.sums = float_dtype(o.reduce_dtype);
    return m;
}

}  // namespace llamac
