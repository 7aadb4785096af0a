// The options of a model, besides its shape (model/config.h).
#pragma once
#include "model/decode.h"
#include "model/fp8.h"
#include "model/parameters.h"

namespace llamac {

// Which activations are discarded after the forward pass and recomputed in the backward pass.
struct Recompute {
    bool norm = false;        // the outputs of both norms
    bool swiglu = false;      // the product that enters the down projection
    bool qkv = false;         // queries, keys and values
    bool attention = false;   // the attention's output
    int64_t block_every = 0;  // every k-th block as a whole, all but its output; 0: none, 1: every block
};

struct ModelOptions {
    int64_t batch_size = 1, seq_len = 1;  // the largest batch that a step will see, in whole sequences
    Precision precision;
    Recompute recompute;
    // The size of a chunk of logits; 0: the largest of the memory of the blocks' gradients, which logits use first, an eighth of
    // the logits, 64 MiB, and half of the logits up to 2 GiB. Without training: 64 MiB.
    int64_t logits_bytes = 0;
    std::vector<std::string> kernels = {};  // as KernelChoices takes them
    bool skip_nonfinite =
        false;              // the optimizer writes nothing where a loss or the gradient norm is not finite
    double loss_scale = 0;  // of fp16 weights: a power of two; 0: it follows overflows
    bool document_mask = false;  // batches may have `first`
    int64_t predicted_rows = 0;  // that batches with set_predicted() have; 0: there are none
    Axis tensor = {}, context = {}, pipeline = {};  // of the mesh
    Sharding sharding = {};
    std::optional<Fp8Options> fp8 = {};  // none: products in the storage type
    bool training = true;                // false: weights and forward passes alone
    std::vector<LayerRange> layers =
        {};  // that the model holds; of none, those of its stage (model/pipeline.h)
    std::vector<std::string> frozen = {};  // patterns (fnmatch) of the names of parameters that do not train
    bool frozen_codes = false;             // whether frozen matrices of blocks are kept in fp8
    Lora lora = {};                        // adapters, which train beside frozen weights
    int64_t micro_batches = 1;             // whose activations are held at the same time
    int64_t micro_batches_per_step = 1, chunks = 1;  // of a pipeline's stage
    CacheSize cache = {};  // of sequences that are continued; no cache where it has no positions
    // This rank's tokens of a sequence, and its rows of the largest batch.
    int64_t own_len() const { return seq_len / context.ranks; }
    int64_t rows() const { return batch_size * own_len(); }
    // With tensor parallelism also all ranks, and those of the tensor axis; with context parallelism those of its axis; with pipeline
    // parallelism all ranks, those of the stage, those of the pipeline, and its ends.
    int64_t communicators() const {
        return sharding.communicators() + (tensor.ranks > 1 ? 2 : 0) + (context.ranks > 1 ? 1 : 0) +
               (pipeline.ranks > 1 ? 4 : 0);
    }
    // Whether forward passes exchange data with other ranks, all of which must run them.
    bool passes_exchange() const {
        return tensor.ranks > 1 || context.ranks > 1 || pipeline.ranks > 1 || sharding.shares_weights();
    }
    bool graphs = true;  // the cache's pass of one token per sequence is recorded and replayed
};

}  // namespace llamac
