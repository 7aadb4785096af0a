// Pipeline parallelism over Model::pipeline (model/mesh.h): each stage holds consecutive layers, the first one also the embedding,
// the last one the final norm and the head. Stages send the residual stream to the next one and its gradient to the one before, in
// the order of model/pipeline_schedule.h. With one stage, these functions do nothing.
//
// Where the head is the embedding, the first and the last stage hold the matrix (FlatParam::is_copy). They sum its gradient and
// compute the same update; the gradient norm and files have the first stage's.
//
// The exchanges are part of the model's stream: the next kernel reads their results.
#pragma once
#include <vector>

#include "model/model.h"
#include "model/pipeline_schedule.h"

namespace llamac {

// The layers of each part of the model, of which a stage has ModelOptions::chunks: part c * stages + s is chunk c of stage s. The
// largest count of FLOPs of a part is as small as it can be; of parts with the same count, the one with the least memory gets the
// next layer. Throws Error if there are more parts than layers.
std::vector<LayerRange> parts_of(const Config& config, const ModelOptions& options);
// The options with the layers of the model's stage, and the micro-batches that are in flight there.
ModelOptions with_stage(const Config& config, const ModelOptions& options);

// The part of the passes' time in which a stage waits for others, if all passes take the same time.
double bubble(int64_t stages, int64_t micro_batches, int64_t chunks = 1);

// The transfers of a training step, of micro-batches that use_micro_batch() numbers modulo ModelOptions::micro_batches.
void transfer(Model& model, const std::vector<PipelineTransfer>& transfers);
// The input of a chunk's pass without gradients, and its output.
void receive_input(Model& model, int64_t chunk);
void send_output(Model& model, int64_t chunk);
// After the gradients of a step: the sum of tied stages' gradients, and the losses' squares, which the last stage has.
void finish_gradients(Model& model);
// x = its sum over the stages, or its largest value.
void reduce_over_stages(Model& model, const Tensor& x, Reduction reduction = Reduction::sum);
// Logits [count,V] in host memory, which the last stage has.
void share_logits(Model& model, float* logits, int64_t count);

}  // namespace llamac
