// Context parallelism over Model::context_ranks (Pieces in model/mesh.h). With one rank of the axis, these functions do what they
// do without a division.
//
// A rank has two pieces of each sequence: its tokens, their residual stream, norms, products and losses. Attention alone reads other
// ranks' rows: each rank gathers the keys and values of whole sequences (Dubey et al., "The Llama 3 Herd of Models", 2024, section
// 3.3.2), which with grouped queries are small, and calls it for each of its pieces, whose queries have the last positions of the
// keys that they see. The backward pass gathers them again, and sums their gradients over the ranks. The exchanges are part of the
// model's stream: the next kernel reads their results.
#pragma once
#include "model/model.h"

namespace llamac {

// Throws Error if the model or the batch cannot be divided.
void check_context_parallel(const Config& config, const ModelOptions& options);
// After the activations.
void plan_context_parallel(Model& model);

// Whether a pass without cache has pieces of its sequences.
bool has_pieces(const Model& model);
// Of the sequences of the batch.
Pieces pieces_of(const Model& model);

// Enqueues the copies of this rank's tokens out of ids [B,T], on the host or the device, to [B,T/ranks].
void copy_own_tokens(const Model& model, const Tensor& own, const int32_t* ids);
// The same to [2,B,T/ranks/2], half by half, as calls of attention for a piece read them.
void copy_own_halves(const Model& model, const Tensor& own, const int32_t* ids);
// RoPE's angles of the rank's tokens, in activations.cis, unless it has them.
void make_cis_of_pieces(Model& model);
// The tokens' positions, each in its document or sequence.
void find_positions_of_pieces(const Model& model);

// Half 0 or 1 of heads [B,T,heads,HD]; of memory that has one half after another: [B,NH,T] or [B,T].
Tensor half_of_heads(const Tensor& heads, int64_t half);
Tensor half_of_memory(const Tensor& x, int64_t half);

struct KeysAndValues {
    Tensor k, v;  // [B,S,NKV,HD]
};
// Keys and values of whole sequences, from those of each rank.
void gather_keys(Model& model, const Tensor& k, const Tensor& v);
// Those that the queries of a piece see, up to its own.
KeysAndValues keys_of_half(const Model& model, int64_t half);
// Memory for their gradients.
KeysAndValues key_gradients_of_half(const Model& model, int64_t half);
// The gradients of this rank's keys and values, from those of both halves of each rank, which are overwritten.
void sum_key_gradients(Model& model, const Tensor& dk, const Tensor& dv);

}  // namespace llamac
