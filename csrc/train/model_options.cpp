#include "train/model_options.h"

namespace llamac {

ModelOptions model_options(const Options& o) {
    ModelOptions m;
    m.batch_size = o.batch_size;
    m.seq_len = o.seq_len;
    m.precision = {storage_type(o.dtype), storage_type(o.grad_dtype), storage_type(o.optimizer_state),
                   o.master_weights == "on"};
    m.recompute = parse_recompute(o.recompute);
    m.kernels = o.kernel;
    return m;
}

}  // namespace llamac
