// Tensor and sequence parallelism over Model::tensor (model/mesh.h). With one rank, these functions do nothing, or what they do
// without a division.
//
// Each linear of a block is divided by outputs or by inputs (LinearRow::split), embedding and head by tokens. Between them, the
// residual stream is divided by rows (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022): a
// rank has N / ranks rows of it, rounded up, and computes their norms. Rows are gathered before a product that is divided by outputs,
// and after one that is divided by inputs its terms are summed and scattered; the backward pass does the reverse. So a gradient of a
// norm's weight is a sum over the ranks (FlatParam::partial). The exchanges are part of the model's stream: the next kernel reads
// their results.
#pragma once
#include "model/model.h"

namespace llamac {

// After the activations.
void plan_tensor_parallel(Model& model);

// This rank's rows of a tensor [N,C], which has memory for all ranks' rows.
Tensor own_rows(const Model& model, const Tensor& rows);
// All rows, from those of each rank.
void gather_rows(Model& model, const Tensor& rows);
// own = this rank's rows of the sum of the ranks' terms; own may be these rows of `terms`.
void reduce_rows(Model& model, const Tensor& own, const Tensor& terms);
// Memory for terms whose sum over the ranks becomes `own`; with one rank, `own`. Until the next call.
Tensor terms_of(const Model& model, const Tensor& own);
// x = its sum over the ranks, or its largest value.
void reduce_over_tensor(Model& model, const Tensor& x, Reduction reduction = Reduction::sum);
// Sums the partial gradients of a segment over the ranks.
void sum_partial_gradients(Model& model, int64_t segment);

// The batch's tokens, as rows of this rank's part of the embedding: those of other ranks are its last row, which is zeros.
Tensor tokens_of_rank(const Model& model);
// Its gradient, which has come from other ranks' tokens.
void clear_zero_row(const Model& model, const Tensor& dweight);
// The batch's targets, as columns of this rank's logits; negative: of another rank.
Tensor targets_of_rank(const Model& model);
// Cross-entropy of a chunk of rows, and with data in dlogits its gradient, from this rank's columns.
void compute_losses(Model& model, const Tensor& losses, const Tensor& dlogits, const Tensor& logits,
                    const Tensor& targets, const Tensor& dlosses);
// Rows of logits of all tokens, [rows, whole.V] in host memory, from each rank's columns.
void gather_logits(Model& model, const Tensor& rows, float* to);

}  // namespace llamac
