// The table of activations: shapes, types, and the part of a block that makes each. It drives allocation,
// recomputation and the memory report.
#pragma once
#include <vector>

#include "core/arena.h"
#include "model/config.h"
#include "model/recompute.h"

namespace llamac {

// The parts of a block in the order of computation; a set of them says what to run, keep or compute again.
enum Part : unsigned {
    input_norm_part = 1,
    qkv_part = 2,
    attention_part = 4,
    residual_mid_part = 8,
    post_norm_part = 16,
    gate_up_part = 32,
    swiglu_part = 64,
    residual_out_part = 128,
    all_parts = 255,
};

// N = B*T rows, as operations take them.
struct BlockActivations {
    Tensor input_norm, input_rstd;  // [N,C], [N]
    Tensor qkv;                     // [N,QKV]: queries and keys after RoPE, values
    Tensor attention, lse;          // [N,NH*HD], [B,NH,T]
    Tensor residual_mid;            // [N,C]
    Tensor post_norm, post_rstd;    // [N,C], [N]
    Tensor gate_up, swiglu;         // [N,2F], [N,F]
    Tensor residual_out;            // [N,C]
};

struct Activations {
    Tensor tokens, targets;  // [B,T] i32
    Tensor cis;        // [T,HD/2,2] cosines and sines of RoPE: of the longest sequence, seen as the batch's T
    Tensor embedding;  // [N,C]
    std::vector<BlockActivations> blocks;  // what is recomputed shares one memory over the layers, swiglu
                                           // with its gradient
    Tensor final_norm, final_rstd;         // [N,C], [N]
    Tensor logits;                         // [rows of a chunk, V]; their gradient takes their place
    Tensor more_logits;                    // what they need beyond dqkv to dswiglu, right behind
    Tensor losses;                         // [N]
    // Gradients: one layer's at a time.
    Tensor dresidual, dnorm, dqkv, dattention, dgate_up, dswiglu;
};

// The parts of block `layer` that the backward pass computes again.
unsigned recomputed_parts(const Recompute& recompute, int64_t layer);

// Plans memory for B sequences of T tokens. logits_bytes: of a chunk of logits, which use the memory of the blocks'
// gradients first; 0: the largest of that memory, an eighth of the logits, 64 MiB, and half of the logits up to 2 GiB.
void plan_activations(Activations& a, const Config& config, int64_t B, int64_t T, DType dtype,
                      const Recompute& recompute, int64_t logits_bytes, Arena& arena);

// Gives the planned tensors the shapes of a batch that is no larger than planned.
void reshape_activations(Activations& a, const Config& config, int64_t B, int64_t T);

}  // namespace llamac
